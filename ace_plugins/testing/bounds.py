"""The paper's two bounds: on the change from dropping the branches, and on the equivariance error.

The theorems are about consecutive layers, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
state "0 at 0", but its proof needs this: the proof bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..contract.sites import Node, Site
from ..engine.branches import Flat, Norm
from ..engine.measure import adapter_of, convert_to_double, get_ace, hide_from_budget, use_branches
from ..engine.scheduled import PenalisedLinear
from ..engine.spectral_norm import SNLinear
from ..engine.state import Ace, unwrap
from ..errors import AdapterError, ConfigError
from ..symmetry.measure import as_call, as_double, compare_orders, evaluate, preserve_state

SLOPES: dict[type[nn.Module], float] = {
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten, nn.ReLU, nn.Tanh, nn.Softplus), 1.0),
    nn.Sigmoid: 0.25,
    nn.GELU: 1.1290,
    nn.SiLU: 1.0999,
}
"""Mapping from a layer without weights to its Lipschitz constant in eval mode (its steepest slope), rounded up."""


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
    the bound by B once more, as a bound on the norm of the group's action. That is not a bound if B < 1.
    """
    total = 0.0
    for k, gamma in enumerate(gammas):
        # M (1 + C |gamma|) with C = max(B / M, 1), written so that M may be 0.
        others = (M + max(B, M) * abs(other) for j, other in enumerate(gammas) if j != k)
        total += abs(gamma) * math.prod(others)
    return 2 * B * total * norm


@torch.no_grad()
def lipschitz(branch: Any) -> float:
    """Return the product of the Lipschitz constants of a branch's layers in eval mode."""
    kind = parametrize.type_before_parametrizations(branch)
    if kind is Flat:
        return lipschitz(branch.inner)
    if kind is nn.Sequential:
        return math.prod(map(lipschitz, branch))
    if kind in (nn.Linear, PenalisedLinear, SNLinear):
        # The norm of an SNLinear is not exactly 1, because its power iteration may lag behind training.
        weight = branch.matrix() if kind is SNLinear else branch.weight
        return float(torch.linalg.matrix_norm(weight.double(), 2))
    if kind in (Norm, nn.BatchNorm1d) and branch.running_var is not None and branch.weight is not None:
        return float((branch.weight * (branch.running_var + branch.eps).rsqrt()).abs().max())
    if kind not in SLOPES:
        raise AdapterError(f"bounds: the Lipschitz constant of {kind.__name__} in a branch is unknown")
    return SLOPES[kind]


@dataclass(frozen=True)
class Bounds:
    """Both of the paper's bounds for an attached model with its branches on, and the values measured on one batch.

    Norms are taken over all outputs with an action together. B, M and ||x|| are valid for this batch only.
    """

    theorem_1: float
    theorem_2: float
    measured_1: float
    """||f_gamma(x) - f_0(x)||: the change from dropping the branches, which ``theorem_1`` bounds."""
    measured_2: float
    """Largest ||rho_Y(g) f(x) - f(rho_X(g) x)|| over random g without translation, which ``theorem_2`` bounds."""
    B: float
    """Upper bound of ||f_neq(z)|| / ||z|| for every branch f_neq and the input z that it reads on this batch."""
    M: float
    """Largest Lipschitz constant of a layer; an estimate that can be too small, but not too large."""
    norm: float
    """||x||: norm of the input of the first branch."""
    gammas: dict[str, float]
    """Mapping from the name of each site to its gamma, in the order of the forward pass."""
    branches: dict[str, float]
    """Mapping from the name of each site to the B of its branch."""

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as a dict for JSON; values that are not finite become None."""
        content = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, seed: int = 0) -> Bounds:
    """Compute the paper's bounds for an attached model with its branches on, and measure what they bound.

    B is the product of the spectral norms of a branch's linear maps and the steepest slopes of its nonlinearities, over
    the whole chain if a branch reads another branch. BatchNorm counts with its running statistics. The norm of the
    branch's output for input 0 (due to biases), divided by the norm of its input, is added.

    M is estimated from below. Let a_k be the change of the model's output due to the branch of the k-th of L layers,
    divided by the norm of what this branch adds. Then M is at least the (L - k)-th root of a_k. M also covers the
    growth of the branches' inputs from layer to layer, divided by 1 + |gamma|. So ``measured_1`` never exceeds
    ``theorem_1`` except by rounding; ``theorem_2`` is an estimate. Everything after the last site counts as one more
    layer, with gamma = 0.

    Args:
        model: An attached model. A copy is evaluated, in float64 and eval mode where possible.
        batch: A tuple of positional arguments, a dict of keyword arguments, a `Call`, or a single argument.
        samples: Number of random group elements for ``measured_2``.
        seed: Seed of the group elements and of every forward pass.

    Returns:
        The bounds, the measured values and the constants behind them.

    Raises:
        ConfigError: ``samples`` is below 1.
        AttachError: The model has no ACE attached.
        AdapterError: The theorems do not cover a branch: it does not run exactly once per forward pass, its input is 0,
            or it contains a layer whose Lipschitz constant is unknown.
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

        with _watch(ace) as calls:
            output = evaluate(model, *call, seed)
        for site in ace.sites:
            if len(found := calls.get(site.name, [])) != 1 or not found[0][0].any():
                reason = f"runs {len(found)} times per forward pass: expected once, on an input other than 0"
                raise AdapterError(f"bounds: the branch of {site.name!r} {reason}")
        gammas = dict(zip((site.name for site in ace.sites), ace.gamma.tolist(), strict=True))
        gammas = {name: gammas[name] for name in calls}
        reads, given = zip(*(call for (call,) in calls.values()), strict=True)
        branches = {name: _bound_branch(ace, name, read) for name, read in zip(gammas, reads, strict=True)}
        B, norm = max(branches.values()), float(reads[0].norm())
        growth, grown = [0.0], 1.0  # values that M cannot be below, and the product of 1 + |gamma|
        before = none = run(())
        for k, gamma in enumerate(gammas.values()):
            if k:
                growth.append((float(reads[k].norm()) / norm / grown) ** (1 / k))
            grown *= 1 + abs(gamma)
            after = run(list(gammas)[: k + 1])
            if size := abs(gamma) * float(given[k].norm()):
                growth.append((_distance(after, before) / size) ** (1 / (len(gammas) - k)))
            before = after
        chain, M = [*gammas.values(), 0.0], max(growth)
        generator = torch.Generator().manual_seed(seed)
        elements = (action.group.sample(generator, scale=0.0) for _ in range(samples))
        error = max(_distance(*pair) for pair in compare_orders(model, action, call, output, elements, seed))
    first, second = theorem_1(chain, B, M, norm), theorem_2(chain, B, M, norm)
    return Bounds(first, second, _distance(before, none), error, B, M, norm, gammas, branches)


@contextmanager
def _watch(ace: Ace) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record the calls of every site's branch inside the block, by the site's name and in the order of the first calls.

    A call is the input of the branch, or of the first branch of its chain, and the output of the branch.
    """
    inputs: dict[str, Tensor] = {}
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(node: Node, branch: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        inputs[node.name] = args[0].detach().clone()
        if isinstance(node, Site):
            calls.setdefault(node.name, []).append((inputs[_chain(ace, node)[0]], output.detach().clone()))

    with ExitStack() as hooks:
        for node in ace.nodes.values():
            hooks.enter_context(ace.branch(node.name).register_forward_hook(partial(keep, node)))
        yield calls


def _chain(ace: Ace, node: Node) -> list[str]:
    """Return the names of the stems and sites whose branches feed this node's branch, in order, with this node last."""
    through = [node.through] if isinstance(node, Site) and node.through is not None else []
    return [*(_chain(ace, ace.nodes[node.reads]) if isinstance(node.reads, str) else ()), *through, node.name]


def _distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return math.hypot(*(float((as_double(y) - as_double(two[name])).norm()) for name, y in one.items()))


def _bound_branch(ace: Ace, name: str, read: Tensor) -> float:
    """Return B of one site: its Lipschitz constant, plus the norm of its output for 0 over the norm of its input."""
    constant, at_zero = 1.0, torch.zeros_like(read)
    for step in _chain(ace, ace.nodes[name]):
        constant *= lipschitz(ace.branch(step))
        at_zero = ace.branch(step)(at_zero).detach()
    return constant + float(at_zero.norm() / read.norm())
