"""The paper's two bounds: on the change from dropping the branches, and on the equivariance error.

The theorems are about consecutive layers, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
state "0 at 0", but its proof needs this: the proof bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ..errors import ConfigError
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
    """Return the product of the Lipschitz constants of a branch's layers in eval mode.

    Raises TypeError with the class of a layer whose constant is unknown.
    """
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
        raise TypeError(kind.__name__)
    return SLOPES[kind]


@dataclass(frozen=True)
class Bounds:
    """Both of the paper's bounds for an attached model with its branches on, and the values measured on one batch.

    Norms are taken over all outputs with an action together. B, M and ||x|| are valid for this batch only. If a branch
    does not fit the theorems, the bounds, B, M and ||x|| are None, and ``notes`` has the reason.
    """

    theorem_1: float | None
    theorem_2: float | None
    measured_1: float
    """||f_gamma(x) - f_0(x)||: the change from dropping the branches, which ``theorem_1`` bounds."""
    measured_2: float
    """Largest ||rho_Y(g) f(x) - f(rho_X(g) x)|| over random group elements g without translation; see ``theorem_2``."""
    B: float | None
    """Upper bound of ||f_neq(z)|| / ||z|| for every branch f_neq and the input z that it reads on this batch."""
    M: float | None
    """Largest Lipschitz constant of a layer; an estimate that can be too small, but not too large."""
    norm: float | None
    """||x||: norm of the input of the first branch."""
    gammas: dict[str, float]
    """Mapping from the name of each site to its gamma, in the order of the forward pass."""
    branches: dict[str, float | None]
    """Mapping from the name of each site to the B of its branch; None if that is unknown."""
    notes: tuple[str, ...]
    """Differences between the model and the theorems' setting."""

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as a dict for JSON; values that are not finite become None."""
        content = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, seed: int = 0) -> Bounds:
    """Compute the paper's bounds for an attached model with its branches on, and measure what they bound.

    B is the product of the spectral norms of a branch's linear maps and the steepest slopes of its nonlinearities, over
    the whole chain if a branch reads another branch. BatchNorm counts with its running statistics. The norm of the
    branch's output for input 0 (due to biases), divided by the norm of its input, is added.

    M is estimated from below. If the branch of the k-th of L layers changes the model's output by a_k times the norm of
    what it adds to its layer, M is at least the (L - k)-th root of a_k. M also covers the growth of the branches'
    inputs from layer to layer, divided by 1 + |gamma|. So ``measured_1`` never exceeds ``theorem_1`` except by
    rounding; ``theorem_2`` is an estimate. Everything after the last site counts as one more layer, with gamma = 0.

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
    """
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    model = unwrap(model)
    get_ace(model)  # raises AttachError
    action = adapter_of(model).action(model)
    model, batch, as_given = convert_to_double(model, batch, copied=True)
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
        every = dict(zip((site.name for site in ace.sites), ace.gamma.tolist(), strict=True))
        gammas = {name: every[name] for name in dict.fromkeys((*calls, *every))}
        notes = [as_given] if as_given else []
        branches = {name: _bound_branch(ace, name, calls.get(name, ()), notes) for name in gammas}
        known = [value for value in branches.values() if value is not None]
        first = second = B = M = norm = None
        if len(known) == len(branches):
            B, norm = max(known), float(next(iter(calls.values()))[0][0].norm())
            M = _estimate_growth(run, gammas, [made[0] for made in calls.values()])
            layers = [*gammas.values(), 0.0]
            first, second = theorem_1(layers, B, M, norm), theorem_2(layers, B, M, norm)
        if chained := [site.name for site in ace.sites if len(_chain(ace, site)) > 1]:
            notes.append(f"branches form chains at {', '.join(chained)}; in the theorems each reads its layer's input")
        generator = torch.Generator().manual_seed(seed)
        elements = (action.group.sample(generator, scale=0.0) for _ in range(samples))
        error = max(_distance(*pair) for pair in compare_orders(model, action, call, output, elements, seed))
        return Bounds(first, second, _distance(run(every), run(())), error, B, M, norm, gammas, branches, tuple(notes))


Calls = dict[str, list[tuple[Tensor, Tensor]]]
"""Mapping from each site to the calls of its branch, in the order of the forward pass. A call is a pair of tensors: the
input of the branch, or of the first branch of its chain, and the output of the branch."""


@contextmanager
def _watch(ace: Ace) -> Iterator[Calls]:
    """Record the calls of all branches inside the block."""
    inputs: dict[str, Tensor] = {}
    calls: Calls = {}

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


def _bound_branch(ace: Ace, name: str, calls: Sequence[tuple[Tensor, Tensor]], notes: list[str]) -> float | None:
    """Return B of one site: its Lipschitz constant, plus the norm of its output for 0 over the norm of its input.

    If B is unknown, return None and add the reason to ``notes``.
    """
    if name in ace.prepared_by:
        reason = "its branch adds itself to the output"
    elif len(calls) != 1 or not calls[0][0].any():
        reason = f"its branch runs {len(calls)} times per forward pass: expected once, with an input other than 0"
    else:
        read, constant = calls[0][0], 1.0
        at_zero = torch.zeros_like(read)
        try:
            for step in _chain(ace, ace.nodes[name]):
                constant *= lipschitz(ace.branch(step))
                at_zero = ace.branch(step)(at_zero).detach()
            return constant + float(at_zero.norm() / read.norm())
        except TypeError as layer:
            reason = f"the Lipschitz constant of {layer} in its branch is unknown"
    notes.append(f"{name}: no bound, because {reason}")
    return None


def _estimate_growth(
    run: Callable[[Iterable[str]], dict[str, Tensor]],
    gammas: Mapping[str, float],
    calls: Sequence[tuple[Tensor, Tensor]],
) -> float:
    """Estimate M from the growth of the branches' inputs and from what each branch changes in the model's output."""
    found, grown, order = [0.0], 1.0, list(gammas)
    before, norm = run(()), float(calls[0][0].norm())
    for k, (gamma, (read, given)) in enumerate(zip(gammas.values(), calls, strict=True)):
        if k:
            found.append((float(read.norm()) / norm / grown) ** (1 / k))
        grown *= 1 + abs(gamma)
        after = run(order[: k + 1])
        if size := abs(gamma) * float(given.norm()):
            found.append((_distance(after, before) / size) ** (1 / (len(order) - k)))
        before = after
    return max(found)
