"""The paper's two bounds: on the change from dropping the branches, and on the equivariance error.

The theorems are about consecutive layers, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
state "0 at 0", but its proof needs this: the proof bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Node, Site
from ..engine.measure import adapter_of, get_ace, hide_from_budget, use_branches
from ..engine.state import Ace, unwrap
from ..errors import AdapterError, ConfigError
from ..report.trace import to_json
from ..symmetry.measure import as_call, compare_orders, evaluate, measure_distance, preserve_state
from .kit import convert_to_double


def theorem_1(gammas: Sequence[float], B: float, M: float, norm: float) -> float:
    """Return the bound on ||f_gamma(x) - f_0(x)||, with ``norm`` = ||x||, in the product form of the paper's proof."""
    total, grown = 0.0, 1.0
    for gamma in map(abs, gammas):
        total += gamma * grown
        grown *= 1 + gamma
    return B * M ** (len(gammas) - 1) * total * norm


def theorem_2(gammas: Sequence[float], B: float, M: float, norm: float) -> float:
    """Return the bound on the equivariance error ||rho_Y(g) f(x) - f(rho_X(g) x)||, with ``norm`` = ||x||.

    The group must not change the norm of features, which is true for rotations and reflections. The paper multiplies
    by B once more, to bound the norm of the group's action. The product is not a bound if B < 1.
    """
    total = 0.0
    for k, gamma in enumerate(gammas):
        # M (1 + C |gamma|) with C = max(B / M, 1), written so that M may be 0.
        others = (M + max(B, M) * abs(other) for j, other in enumerate(gammas) if j != k)
        total += abs(gamma) * math.prod(others)
    return 2 * B * total * norm


@dataclass(frozen=True)
class Bounds:
    """Both of the paper's bounds for an attached model with its branches on, and the values that they bound.

    B and M are measured on one batch, and the bounds are valid for this batch only. Outputs with an action
    count as one vector in all norms.
    """

    theorem_1: float
    theorem_2: float
    measured_1: float
    """||f_gamma(x) - f_0(x)||: the change from dropping the branches, which ``theorem_1`` bounds."""
    measured_2: float
    """Largest ||rho_Y(g) f(x) - f(rho_X(g) x)|| over random g without translation, which ``theorem_2`` bounds."""
    B: float
    """Largest of ``branches``."""
    M: float
    """Largest Lipschitz constant of a layer; an estimate that can be too small, but not too large."""
    norm: float
    """||x||: norm of the input of the first branch."""
    gammas: dict[str, float]
    """Mapping from the name of each site to its gamma, in the order of the forward pass."""
    branches: dict[str, float]
    """Mapping from the name of each site to the largest ||f_neq(z)|| / ||z|| of its branch, over x and all rho_X(g) x.
    If the branch reads another branch, z is the input of the first branch of this chain."""

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as a dict for JSON; values that are not finite become None."""
        return dict(to_json(dataclasses.asdict(self)))


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, seed: int = 0) -> Bounds:
    """Compute the paper's bounds for an attached model with its branches on, and measure what they bound.

    M is the largest of these measured values, two for each layer k = 0, ..., L - 1. The first is the (L - k)-th root of
    a_k: the norm of the change that the layer's branch causes in the model's output, divided by the norm of what the
    branch adds. The second is the mean growth per layer of the branches' inputs, without the factors 1 + |gamma|. With
    this M, ``measured_1`` exceeds ``theorem_1`` at most by rounding. The true M may be larger, so ``theorem_2`` is only
    an estimate. Everything after the last site counts as one more layer, with gamma = 0.

    Args:
        model: An attached model. A copy is evaluated, in float64 and eval mode where possible.
        batch: A tuple of positional arguments, a dict of keyword arguments, a `Call`, or a single argument.
        samples: Number of random group elements g.
        seed: Seed of the group elements and of every forward pass.

    Returns:
        The bounds, the measured values and the constants behind them.

    Raises:
        ConfigError: ``samples`` is below 1.
        AttachError: The model has no ACE attached.
        AdapterError: A branch does not run exactly once per forward pass, as in the theorems, or its input is 0.
    """
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    model = unwrap(model)
    get_ace(model)  # raises AttachError
    action = adapter_of(model).action(model)
    model, batch, _ = convert_to_double(model, batch, copied=True)
    with torch.inference_mode(False), hide_from_budget(model), use_branches(model, True), preserve_state(model):
        ace, call = get_ace(model), as_call(batch)

        def run(on: Iterable[str]) -> dict[str, Tensor]:
            """Return the outputs that have an action, from a forward pass with gamma = 0 at all sites but these."""
            start = ace.gamma.detach().clone()
            with torch.no_grad():
                try:
                    ace.gamma.mul_(torch.tensor([site.name in on for site in ace.sites]).to(start))
                    return action.tensors_to_compare(evaluate(model, *call, seed))
                finally:
                    ace.gamma.copy_(start)

        generator = torch.Generator().manual_seed(seed)
        elements = (action.group.sample(generator, scale=0.0) for _ in range(samples))
        with _watch(ace) as calls:
            pairs = compare_orders(model, action, call, evaluate(model, *call, seed), elements, seed)
            error = max(measure_distance(*pair) for pair in pairs)
        every = dict(zip((site.name for site in ace.sites), ace.gamma.tolist(), strict=True))
        for name in every:
            if len(calls.get(name, ())) != samples + 1 or not all(read for read, _ in calls[name]):
                reason = "does not run exactly once per forward pass, or its input is 0: the theorems do not apply"
                raise AdapterError(f"bounds: the branch of {name!r} {reason}")
        gammas = {name: every[name] for name in calls}
        branches = {name: max(given / read for read, given in found) for name, found in calls.items()}
        first = [found[0] for found in calls.values()]  # the calls in the forward pass on x
        B, norm = max(branches.values()), first[0][0]
        growth, grown = [0.0], 1.0  # values that M cannot be below, and the product of 1 + |gamma|
        before = none = run(())
        for k, (gamma, (read, given)) in enumerate(zip(gammas.values(), first, strict=True)):
            if k:
                growth.append((read / norm / grown) ** (1 / k))
            grown *= 1 + abs(gamma)
            after = run(list(gammas)[: k + 1])
            if gamma and given:
                growth.append((measure_distance(after, before) / abs(gamma) / given) ** (1 / (len(gammas) - k)))
            before = after
        layers, M = [*gammas.values(), 0.0], max(growth)
    bound_1, bound_2 = theorem_1(layers, B, M, norm), theorem_2(layers, B, M, norm)
    return Bounds(bound_1, bound_2, measure_distance(before, none), error, B, M, norm, gammas, branches)


@contextmanager
def _watch(ace: Ace) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Record the calls of every site's branch inside the block, by the site's name and in the order of the first calls.

    A call is a pair: the norm of the input and that of the output. A branch that reads another branch has the input of
    the first branch of this chain.
    """
    inputs: dict[str, float] = {}
    calls: dict[str, list[tuple[float, float]]] = {}

    def keep(node: Node, branch: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        before = node.reads if isinstance(node.reads, str) else getattr(node, "through", None)
        inputs[node.name] = inputs[before] if before else float(args[0].detach().norm())
        if isinstance(node, Site):
            calls.setdefault(node.name, []).append((inputs[node.name], float(output.detach().norm())))

    with ExitStack() as hooks:
        for node in ace.nodes.values():
            hooks.enter_context(ace.branch(node.name).register_forward_hook(partial(keep, node)))
        yield calls
