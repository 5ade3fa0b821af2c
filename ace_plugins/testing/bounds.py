"""The paper's two bounds: on the change from dropping the branches, and on the equivariance error.

The theorems are about consecutive layers, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
state "0 at 0", but its proof needs this: the proof bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from ..contract.sites import AddsItself, Site
from ..engine.branches import Flat, Norm
from ..engine.forward import replace_output, select_output
from ..engine.measure import convert_to_double, get_ace, hide_from_budget, use_branches
from ..engine.scheduled import PenalisedLinear
from ..engine.spectral_norm import SNLinear
from ..engine.state import Ace, unwrap
from ..errors import ConfigError
from ..plugins.registry import registry
from ..symmetry.actions import GroupAction
from ..symmetry.measure import as_call, as_double, compare_orders, evaluate, preserve_state
from .kit import outputs_of


def theorem_1(gammas: Sequence[float], B: float, M: float, norm: float) -> float:
    """Return the bound on ||f_gamma(x) - f_0(x)||, with ``norm`` = ||x||, in the product form of the paper's proof."""
    total, grown = 0.0, 1.0
    for gamma in map(abs, gammas):
        total += gamma * grown
        grown *= 1 + gamma
    return B * M ** (len(gammas) - 1) * total * norm


def theorem_2(gammas: Sequence[float], B: float, M: float, norm: float, *, action: float = 1.0) -> float:
    """Return the bound on the equivariance error ||rho_Y(g) f(x) - f(rho_X(g) x)||, with ``norm`` = ||x||.

    ``action`` is a constant with ||rho(g) z|| <= action ||z|| for all features z: 1 for rotations and reflections. The
    paper uses B for this constant too; with two constants the bound also holds for B < 1, and is tighter for B > 1.
    """
    total = 0.0
    for k, gamma in enumerate(gammas):
        # M (1 + C |gamma|) with C = max(B / M, 1), written so that M may be 0.
        others = (M + max(B, M) * abs(other) for j, other in enumerate(gammas) if j != k)
        total += abs(gamma) * math.prod(others)
    return 2 * action * B * total * norm


SLOPES: dict[type[nn.Module], float] = {
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten, nn.ReLU, nn.Tanh, nn.Softplus), 1.0),
    nn.Sigmoid: 0.25,
    nn.GELU: 1.1290,
    nn.SiLU: 1.0999,
}
"""Mapping from a layer without weights to its Lipschitz constant in eval mode (its steepest slope), rounded up."""


def parts(branch: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a branch in order."""
    if isinstance(branch, Flat):
        yield from parts(branch.inner)
    elif type(branch) is nn.Sequential:
        for part in branch:
            yield from parts(part)
    else:
        yield branch


def lipschitz(branch: nn.Module) -> float | None:
    """Return the product of the layers' Lipschitz constants in eval mode; None if `find_unknown` names a layer."""
    constants = [_constant(part) for part in parts(branch)]
    return None if None in constants else math.prod(value for value in constants if value is not None)


def find_unknown(branch: nn.Module) -> list[str]:
    """Return the class names of layers without a known Lipschitz constant."""
    return sorted({type(part).__name__ for part in parts(branch) if _constant(part) is None})


@torch.no_grad()
def _constant(part: nn.Module) -> float | None:
    if isinstance(part, SNLinear):  # not exactly 1: the power iteration may lag behind training
        return float(torch.linalg.matrix_norm(part.matrix().double(), 2))
    kind = parametrize.type_before_parametrizations(part)
    if kind in (nn.Linear, PenalisedLinear):
        weight: Any = part.weight
        return float(torch.linalg.matrix_norm(weight.double(), 2))
    if isinstance(part, nn.BatchNorm1d) and kind in (Norm, nn.BatchNorm1d) and part.running_var is not None:
        scale = (part.running_var + part.eps).rsqrt()
        return float((scale if part.weight is None else scale * part.weight).abs().max())
    if isinstance(part, (nn.LeakyReLU, nn.ELU)):
        return max(1.0, abs(part.negative_slope if isinstance(part, nn.LeakyReLU) else part.alpha))
    return SLOPES.get(kind)


PROBE = 1e-3
"""Norm of a random perturbation, relative to the norm of the site's output that it is added to."""


@dataclass(frozen=True)
class Bounds:
    """Both of the paper's bounds for an attached model with its branches on, and the values measured on one batch.

    Norms are taken over all outputs with an action together. B, M and ||x|| are valid for this batch only.
    """

    theorem_1: float | None
    """Bound on ``measured_1``; None if B or M is unknown, for a reason that is in ``notes``."""
    theorem_2: float | None
    """Bound on ``measured_2``; None if B or M is unknown."""
    measured_1: float
    """||f_gamma(x) - f_0(x)||: the change from dropping the branches."""
    measured_2: float
    """||rho_Y(g) f(x) - f(rho_X(g) x)||: the largest value over random group elements g without translation."""
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
    """Assumptions, and differences between the model and the theorems' setting."""

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as a dict for JSON; values that are not finite become None."""
        content = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, probes: int = 4, seed: int = 0) -> Bounds:
    """Compute the paper's bounds for an attached model with its branches on, and measure what they bound.

    B is computed: it is the product of the spectral norms of a branch's linear maps and the steepest slopes of its
    nonlinearities. BatchNorm counts with its running statistics. If a branch reads the output of another branch, the
    product runs over both. The norm of the branch's output for input 0 (due to biases), divided by the norm of its
    input, is added.

    M is estimated from below: the output of the k-th of L layers is perturbed, by its own branch and by ``probes``
    random perturbations. If the model's output changes by a_k times the perturbation, M is at least the (L - k)-th root
    of a_k. M also covers the growth of the branches' inputs from layer to layer, in f_0 and in f_gamma (divided by
    1 + |gamma| there). Because the branches are among the perturbations, ``measured_1`` never exceeds ``theorem_1``
    except by rounding; ``theorem_2`` is an estimate. Everything after the last site counts as one more layer with
    gamma = 0.

    Args:
        model: An attached model. A copy is evaluated, in float64 and eval mode where possible.
        batch: A tuple of positional arguments, a dict of keyword arguments, a `Call`, or a single argument.
        samples: Number of random group elements for ``measured_2``.
        probes: Number of random perturbations per site.
        seed: Seed of the group elements and the perturbations.

    Returns:
        The bounds, the measured values and the constants behind them.

    Raises:
        ConfigError: ``samples`` or ``probes`` is too small.
        AttachError: The model has no ACE attached.
    """
    if samples < 1 or probes < 0:
        raise ConfigError(f"expected samples of at least 1 and probes of at least 0, found {samples} and {probes}")
    model = unwrap(model)
    action: GroupAction = registry().adapter(get_ace(model).adapter).action(model)
    copied, batch, as_given = convert_to_double(model, batch, copied=True)
    with torch.inference_mode(False), hide_from_budget(copied), use_branches(copied, True), preserve_state(copied):
        run = _Passes(copied, get_ace(copied), action, as_call(batch), seed)
        seen = run.watch(run.names)
        order = list(seen.outputs)
        gammas = {name: float(run.gammas[run.names.index(name)]) for name in order}
        full, none = run.outputs(run.names), run.outputs([])
        last = seen.outputs[order[-1]]
        tail = not any(y.shape == last.shape and torch.equal(y, last) for y in full.values())
        each = {name: _branch_bound(run.ace, name, seen.reads.get(name)) for name in order}
        B = None if None in each.values() else max(value for value in each.values() if value is not None)
        norm = float(seen.reads[order[0]].norm()) if order[0] in seen.reads else None
        M = first = second = None
        if norm and max(seen.calls.values()) == 1:
            M = _estimate_growth(run, seen, gammas, norm, tail, probes)
        if B is not None and M is not None and norm is not None:
            chain = [*gammas.values(), *([0.0] if tail else [])]
            first, second = theorem_1(chain, B, M, norm), theorem_2(chain, B, M, norm)
        measured = _distance(full, none), _equivariance(run, samples)
        notes = tuple(_notes(run.ace, seen, tail, as_given))
        return Bounds(first, second, *measured, B, M, norm, gammas, each, notes)


@dataclass
class _Seen:
    """Tensors at the sites in one forward pass."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Mapping from each site to its output, in the order of the forward pass."""
    reads: dict[str, Tensor] = field(default_factory=dict)
    """Mapping from each site to the input of its branch, or of the first branch of its chain."""
    given: dict[str, Tensor] = field(default_factory=dict)
    """Mapping from each site to the output of its branch."""
    calls: Counter[str] = field(default_factory=Counter)


@dataclass
class _Passes:
    """Forward passes of one attached model on one batch, with chosen gammas."""

    model: nn.Module
    ace: Ace
    action: GroupAction
    call: tuple[tuple[Any, ...], Mapping[str, Any]]
    seed: int

    def __post_init__(self) -> None:
        self.gammas = self.ace.gamma.detach().clone()
        self.names = [site.name for site in self.ace.sites]

    def output(self, sites: Sequence[str]) -> Any:
        """Run the model with gamma unchanged at the given sites and 0 at all others."""
        mask = torch.tensor([name in sites for name in self.names]).to(self.gammas)
        try:
            with torch.no_grad():
                self.ace.gamma.copy_(self.gammas * mask)
            return evaluate(self.model, *self.call, self.seed)
        finally:
            with torch.no_grad():
                self.ace.gamma.copy_(self.gammas)

    def outputs(self, sites: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs that have an action, from a run with gamma = 0 at all sites but the given ones."""
        return self.action.tensors_to_compare(self.output(sites))

    def watch(self, sites: Sequence[str]) -> _Seen:
        """Run the model with gamma = 0 at all sites but the given ones, and keep the tensors at all sites."""
        seen, inputs = _Seen(), dict[str, Tensor]()
        first = {site.name: _chain(self.ace, site)[0] for site in self.ace.sites}

        def keep(name: str, branch: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inputs[name] = args[0].detach().clone()
            if name in first:
                seen.calls[name] += 1
                seen.reads[name], seen.given[name] = inputs[first[name]], output.detach().clone()

        self.output(sites)  # ACE registers its own hooks in this pass, so that they run before those below
        with ExitStack() as hooks:
            for name in self.ace.nodes:
                hooks.enter_context(self.ace.branch(name).register_forward_hook(partial(keep, name)))
            seen.outputs = hooks.enter_context(outputs_of(self.model, self.ace.sites))
            self.output(sites)
        return seen

    def perturb(self, site: Site, by: Tensor) -> RemovableHandle:
        """Add the tensor ``by`` to the site's output until the handle is removed."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return replace_output(output, site, select_output(output, site) + by)

        return self.model.get_submodule(site.module).register_forward_hook(hook)


def _chain(ace: Ace, node: Any) -> list[str]:
    """Return the names of the stems and sites whose branches feed this node's branch, in order, with this node last."""
    through = getattr(node, "through", None)
    names = [node.name] if through is None else [through, node.name]
    return [*_chain(ace, ace.nodes[node.reads]), *names] if isinstance(node.reads, str) else names


def _distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return math.hypot(*(float((as_double(y) - as_double(two[name])).norm()) for name, y in one.items()))


def _branch_bound(ace: Ace, name: str, read: Tensor | None) -> float | None:
    """Return B of one site: its Lipschitz constant, plus the norm of its output for 0 over the norm of its input."""
    if read is None or name in ace.prepared_by:
        return None
    constant, at_zero = 1.0, torch.zeros_like(read)
    for step in _chain(ace, ace.nodes[name]):
        known = lipschitz(ace.branch(step))
        if known is None:
            return None
        constant *= known
        at_zero = ace.branch(step)(at_zero).detach()
    offset, size = float(at_zero.norm()), float(read.norm())
    return constant + (offset / size if size else math.inf if offset else 0.0)


def _estimate_growth(
    run: _Passes, seen: _Seen, gammas: Mapping[str, float], norm: float, tail: bool, probes: int
) -> float | None:
    """Estimate M from perturbations of the sites' outputs and from the growth of the branches' inputs."""
    order = list(seen.outputs)
    if any(name not in seen.reads for name in order):
        return None
    found = [0.0]
    layers = len(order) + tail
    generator = torch.Generator().manual_seed(run.seed)
    before = plain = run.outputs([])
    without = run.watch([])
    grown = norm
    for k, name in enumerate(order, 1):
        site = run.ace.nodes[name]
        assert isinstance(site, Site)
        if k > 1:
            sizes = float(seen.reads[name].norm()) / grown, float(without.reads[name].norm()) / norm
            found.append(max(sizes) ** (1 / (k - 1)))
        grown *= 1 + abs(gammas[name])
        after = run.outputs(order[:k])
        contribution = abs(gammas[name]) * float(seen.given[name].norm())
        ratios = [_distance(after, before) / contribution] if contribution else []
        before = after
        output = seen.outputs[name]
        for _ in range(probes):
            step = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
            step *= PROBE * float(output.norm()) / float(step.norm())
            if float(step.norm()):
                with run.perturb(site, step):
                    ratios.append(_distance(run.outputs([]), plain) / float(step.norm()))
        if layers > k:
            found += [ratio ** (1 / (layers - k)) for ratio in ratios]
    return max(found)


def _equivariance(run: _Passes, samples: int) -> float:
    """Return the largest equivariance error over random elements without translation."""
    generator = torch.Generator().manual_seed(run.seed)
    elements = (run.action.group.sample(generator, scale=0.0) for _ in range(samples))
    pairs = compare_orders(run.model, run.action, run.call, run.output(run.names), elements, run.seed)
    return max(_distance(*pair) for pair in pairs)


def _notes(ace: Ace, seen: _Seen, tail: bool, as_given: str) -> Iterator[str]:
    yield "M is estimated from below, so the bounds are estimates"
    yield "the group is assumed to preserve the length of features; translations are left out"
    if as_given:
        yield as_given
    if tail:
        yield "everything after the last site counts as one more layer without a branch"
    branches = {name: ace.branch(name) for name in ace.nodes}
    layers = [part for branch in branches.values() for part in parts(branch)]
    if any(isinstance(part, nn.BatchNorm1d) for part in layers):
        yield "batch norms count with their running statistics, as in eval mode"
    if any(getattr(part, "bias", None) is not None for part in layers):
        yield "branches have biases, so B is valid for this batch only: their output for 0 counts relative to the input"
    for name, branch in branches.items():
        if isinstance(branch, AddsItself):
            yield f"{name}: no bound, because its branch adds itself to the output"
        elif kinds := find_unknown(branch):
            yield f"{name}: no bound, because the Lipschitz constant of {', '.join(kinds)} in its branch is unknown"
    if chained := [site.name for site in ace.sites if len(_chain(ace, site)) > 1]:
        yield f"branches form chains at {', '.join(chained)}; in the theorems every branch reads its layer's input"
    for name, count in seen.calls.items():
        if count > 1:
            yield f"{name}: no bound, because it runs {count} times per forward pass, and once in the theorems"
