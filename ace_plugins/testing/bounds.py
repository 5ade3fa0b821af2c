"""The paper's two bounds: of what dropping the branches changes, and of the equivariance error.

They are about layers one after the other, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
say "0 at 0", but its proof needs it: it bounds ||z_i|| by a product of Lipschitz constants times ||x||.

How much a branch can stretch: the product of what its parts can.

The paper's bounds of an attached model beside what is measured: what dropping the branches changes, and the
equivariance error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..contract.sites import AddsItself, Site
from ..engine.branches import Flat, Norm
from ..engine.forward import chosen_output, with_output
from ..engine.measure import attached, in_double, unwatched, use_branches
from ..engine.scheduled import Map
from ..engine.spectral_norm import SNLinear
from ..engine.state import Ace, unwrapped
from ..errors import ConfigError
from ..plugins.registry import registry
from ..symmetry.actions import GroupAction
from ..symmetry.measure import as_call, as_double, evaluate, forward_names, untouched


def theorem_1(gammas: Sequence[float], B: float, M: float, norm: float) -> float:
    """A bound of ||f_gamma(x) - f_0(x)||, with ``norm`` = ||x||. The product form, which the proof derives."""
    total, grown = 0.0, 1.0
    for gamma in map(abs, gammas):
        total += gamma * grown
        grown *= 1 + gamma
    return B * M ** (len(gammas) - 1) * total * norm


def theorem_2(gammas: Sequence[float], B: float, M: float, norm: float, *, action: float = 1.0) -> float:
    """A bound of ||rho_Y(g) f(x) - f(rho_X(g) x)||, with ``norm`` = ||x||.

    ``action`` is the bound of the group's actions on features, ||rho(g) z|| <= action ||z||: 1 for rotations and
    reflections. The paper has one B for branches and actions, which for these cannot be below 1. With
    ``action = B`` this is what it prints; kept apart it also holds for branches with B < 1, and is tighter.
    """
    total = 0.0
    for k, gamma in enumerate(gammas):
        # M (1 + C |gamma|) with C = max(B / M, 1), which is written so that M may be 0.
        others = (M + max(B, M) * abs(other) for j, other in enumerate(gammas) if j != k)
        total += abs(gamma) * math.prod(others)
    return 2 * action * B * total * norm


STEEPEST: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.Identity: lambda part: 1.0,
    nn.Dropout: lambda part: 1.0,  # which in evaluation does nothing
    nn.Flatten: lambda part: 1.0,
    nn.Unflatten: lambda part: 1.0,
    nn.ReLU: lambda part: 1.0,
    nn.Tanh: lambda part: 1.0,
    nn.Softplus: lambda part: 1.0,
    nn.Sigmoid: lambda part: 0.25,
    nn.LeakyReLU: lambda part: max(1.0, abs(part.negative_slope)),
    nn.ELU: lambda part: max(1.0, abs(part.alpha)),
    nn.GELU: lambda part: 1.1290,  # at the root of 2
    nn.SiLU: lambda part: 1.0999,
}
"""The steepest slope of each nonlinearity, rounded up. That of GELU and SiLU is above 1."""


def parts(branch: nn.Module) -> Iterator[nn.Module]:
    """What a branch is made of, one after the other."""
    if isinstance(branch, Flat):
        yield from parts(branch.inner)
    elif type(branch) is nn.Sequential:
        for part in branch:
            yield from parts(part)
    else:
        yield branch


def lipschitz(branch: nn.Module) -> float | None:
    """The product of the parts' Lipschitz constants in evaluation, which is at least the branch's own.

    None where there is a part of which none is known (`unknown` names them).
    """
    known = [_constant(part) for part in parts(branch)]
    return None if None in known else math.prod(value for value in known if value is not None)


def unknown(branch: nn.Module) -> list[str]:
    """The kinds of the parts that `lipschitz` does not know."""
    return sorted({type(part).__name__ for part in parts(branch) if _constant(part) is None})


@torch.no_grad()
def _constant(part: nn.Module) -> float | None:
    if isinstance(part, SNLinear):
        # Not taken for 1: its direction may lag behind a weight that training moves.
        return float(torch.linalg.matrix_norm(part.matrix().double(), 2))
    kind = parametrize.type_before_parametrizations(part)
    if kind in (nn.Linear, Map):
        weight: Any = part.weight
        return float(torch.linalg.matrix_norm(weight.double(), 2))
    if isinstance(part, nn.BatchNorm1d) and kind in (Norm, nn.BatchNorm1d) and part.running_var is not None:
        scale = (part.running_var + part.eps).rsqrt()
        return float((scale if part.weight is None else scale * part.weight).abs().max())
    steepest = STEEPEST.get(kind)
    return None if steepest is None else steepest(part)


PROBE = 1e-3
"""The size of a random perturbation of a layer's output, relative to it."""


@dataclass(frozen=True)
class Bounds:
    """Both bounds of an attached model with its branches on, and what was measured, on one batch.

    Norms are over everything that the model's outputs with an action hold, and B, M and ||x|| are of this batch.
    """

    theorem_1: float | None
    """The bound of ``measured_1``; None where B or M is not known, which ``notes`` explain."""
    theorem_2: float | None
    """The bound of ``measured_2``."""
    measured_1: float
    """||f_gamma(x) - f_0(x)||: what dropping the branches changes."""
    measured_2: float
    """||rho_Y(g) f(x) - f(rho_X(g) x)||, the largest over random elements without translation."""
    B: float | None
    """The largest ||f_neq(z)|| / ||z|| that the branches can come to at what they read here."""
    M: float | None
    """The Lipschitz constant of a layer, an estimate from below."""
    norm: float | None
    """||x||: of what the first branch reads."""
    gammas: dict[str, float]
    """By site, in the order in which they take part in a forward."""
    branches: dict[str, float | None]
    """Site -> B of its branch alone."""
    notes: tuple[str, ...]
    """What was assumed, and where the model is not as the theorems have it."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no number that is not finite: such a bound is None."""
        told = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in told.items()}


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, probes: int = 4, seed: int = 0) -> Bounds:
    """The paper's bounds for an attached model with its branches on, and what is measured.

    B is computed: the product of the spectral norms of a branch's linear maps and the steepest slopes of its
    nonlinearities, BatchNorm with the statistics it evaluates with; along the chain where a branch reads another.
    What a branch gives for 0, its biases, is added as a share of what it reads here.

    M is estimated, from below: the k-th of L layers' outputs is moved, by its own branch and by ``probes`` random
    perturbations, and the model's output moves a_k times as far; M is the largest of the (L - k)-th roots of a_k. It
    is also no less than what the norms of what branches read grow by from layer to layer, in f_gamma per 1 + |gamma|
    and in f_0. Since the branches' own contributions are among the perturbations, ``measured_1`` is never above
    ``theorem_1``, but for rounding; for ``theorem_2`` M is an estimate only. What follows the last site counts as one
    more layer, with gamma = 0.
    """
    if samples < 1 or probes < 0:
        raise ConfigError(f"expected samples of at least 1 and probes of at least 0, found {samples} and {probes}")
    model = unwrapped(model)
    adapter = registry().adapter(attached(model).adapter)
    action: GroupAction = adapter.action(model)
    copied, batch, as_given = in_double(model, batch, copied=True)
    with torch.inference_mode(False), unwatched(copied), use_branches(copied, True), untouched(copied):
        run = _Run(copied, attached(copied), action, *as_call(batch), seed)
        return _bounds(run, as_given, samples, probes)


@dataclass
class _Read:
    """What a branch read and gave in a forward."""

    read: Tensor
    given: Tensor
    times: int = 1


@dataclass
class _Seen:
    """What happened at the sites in one forward."""

    order: list[str] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[str, _Read] = field(default_factory=dict)


@dataclass
class _Run:
    """Forwards of one attached model on one batch, with gammas of our choice."""

    model: nn.Module
    ace: Ace
    action: GroupAction
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int

    def __post_init__(self) -> None:
        self.gammas = self.ace.gamma.detach().clone()
        self.names = [site.name for site in self.ace.sites]

    def output(self, sites: Sequence[str], args: Any = None, kwargs: Any = None) -> Any:
        """What the model gives with the gammas of these sites alone."""
        mask = torch.tensor([name in sites for name in self.names]).to(self.gammas)
        with torch.no_grad():
            self.ace.gamma.copy_(self.gammas * mask)
        try:
            if args is None:
                args, kwargs = self.args, self.kwargs
            return evaluate(self.model, args, kwargs, self.seed)
        finally:
            with torch.no_grad():
                self.ace.gamma.copy_(self.gammas)

    def compared(self, sites: Sequence[str]) -> dict[str, Tensor]:
        return self.action.compared(self.output(sites))

    def seen(self, sites: Sequence[str]) -> _Seen:
        """A forward with the gammas of these sites alone, watched."""
        found = _Seen()
        paths = {site.name: _path(self.ace, site) for site in self.ace.sites}

        def keep(name: str) -> Callable[..., None]:
            def hook(branch: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                found.inputs[name] = args[0].detach().clone()
                if name in paths:
                    times = found.reads[name].times + 1 if name in found.reads else 1
                    read = found.inputs[paths[name][0]]
                    found.reads[name] = _Read(read, output.detach().clone(), times)

            return hook

        def pass_by(site: Site) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                found.order += [site.name] if site.name not in found.order else []
                found.outputs[site.name] = chosen_output(output, site).detach().clone()

            return hook

        self.output(sites)  # the hooks that add the branches are in place now, before ours
        handles = [self.ace.branch(name).register_forward_hook(keep(name)) for name in self.ace.nodes]
        for site in self.ace.sites:
            handles.append(self.model.get_submodule(site.module).register_forward_hook(pass_by(site)))
        try:
            self.output(sites)
        finally:
            for handle in handles:
                handle.remove()
        return found

    @contextmanager
    def moved(self, site: Site, by: Tensor) -> Iterator[None]:
        """The site's output moved by a constant."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return with_output(output, site, chosen_output(output, site) + by)

        handle = self.model.get_submodule(site.module).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _path(ace: Ace, site: Site) -> list[str]:
    """The stems and sites whose branches this one's is the last of."""
    names: list[str] = []
    node: Any = site
    while True:
        names.insert(0, node.name)
        if isinstance(node, Site) and node.through is not None:
            names.insert(0, node.through)
        if not isinstance(node.reads, str):
            return names
        node = ace.nodes[node.reads]


def _bounds(run: _Run, as_given: str, samples: int, probes: int) -> Bounds:
    seen = run.seen(run.names)
    order = seen.order
    gammas = {name: float(run.gammas[run.names.index(name)]) for name in order}
    full, none = run.compared(run.names), run.compared([])
    tail = not any(_same(y, seen.outputs[order[-1]]) for y in full.values())
    notes = list(_notes(run.ace, seen, tail, as_given))
    each = {name: _branch_bound(run.ace, name, seen) for name in order}
    B = None if None in each.values() else max(value for value in each.values() if value is not None)
    repeated = [name for name, read in seen.reads.items() if read.times > 1]
    norm = float(seen.reads[order[0]].read.norm()) if order[0] in seen.reads else None
    M = None
    if not repeated and norm:
        M = _largest_growth(run, seen, gammas, norm, tail, probes)
    first = second = None
    if B is not None and M is not None and norm is not None:
        chain = [*gammas.values(), *([0.0] if tail else [])]
        first, second = theorem_1(chain, B, M, norm), theorem_2(chain, B, M, norm)
    return Bounds(
        theorem_1=first,
        theorem_2=second,
        measured_1=_distance(full, none),
        measured_2=_equivariance(run, samples),
        B=B,
        M=M,
        norm=norm,
        gammas=gammas,
        branches=each,
        notes=tuple(notes),
    )


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.equal(one, two)


def _distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return math.hypot(*(float((as_double(y) - as_double(two[name])).norm()) for name, y in one.items()))


def _branch_bound(ace: Ace, name: str, seen: _Seen) -> float | None:
    """B of one site at what it reads: the Lipschitz constant, and what it gives for 0 as a share of what it reads."""
    if name not in seen.reads or name in ace.prepared_by:
        return None
    read = seen.reads[name].read
    site = ace.nodes[name]
    assert isinstance(site, Site)
    constant, at_zero = 1.0, torch.zeros_like(read)
    for step in _path(ace, site):
        known = lipschitz(ace.branch(step))
        if known is None:
            return None
        constant *= known
        at_zero = ace.branch(step)(at_zero).detach()
    offset, size = float(at_zero.norm()), float(read.norm())
    return constant + (offset / size if size else math.inf if offset else 0.0)


def _largest_growth(
    run: _Run, seen: _Seen, gammas: Mapping[str, float], norm: float, tail: bool, probes: int
) -> float | None:
    """M: by how much a layer's output moves with what goes in, and by how much its size grows, at least."""
    found = [0.0]
    order = seen.order
    layers = len(order) + tail
    generator = torch.Generator().manual_seed(run.seed)
    before = plain = run.compared([])
    without = run.seen([])
    grown = norm
    for k, name in enumerate(order, 1):
        site = run.ace.nodes[name]
        assert isinstance(site, Site)
        read = seen.reads.get(name)
        if read is None:
            return None
        if k > 1:
            sizes = float(read.read.norm()) / grown, float(without.reads[name].read.norm()) / norm
            found.append(max(sizes) ** (1 / (k - 1)))
        grown *= 1 + abs(gammas[name])
        after = run.compared(order[:k])
        contribution = abs(gammas[name]) * float(read.given.norm())
        ratios = [_distance(after, before) / contribution] if contribution else []
        before = after
        output = seen.outputs[name]
        for _ in range(probes):
            step = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
            step *= PROBE * float(output.norm()) / float(step.norm())
            if float(step.norm()):
                with run.moved(site, step):
                    ratios.append(_distance(run.compared([]), plain) / float(step.norm()))
        if layers > k:
            found += [ratio ** (1 / (layers - k)) for ratio in ratios]
    return max(found)


def _equivariance(run: _Run, samples: int) -> float:
    generator = torch.Generator().manual_seed(run.seed)
    names = forward_names(run.model)
    output = run.output(run.names)
    errors = []
    for _ in range(samples):
        element = run.action.group.sample(generator, scale=0.0)
        expected = run.action.compared(run.action.act_on_outputs(element, output))
        turned = run.action.act_on_inputs(element, names, run.args, run.kwargs)
        errors.append(_distance(expected, run.action.compared(run.output(run.names, *turned))))
    return max(errors)


def _notes(ace: Ace, seen: _Seen, tail: bool, as_given: str) -> Iterator[str]:
    yield "M is an estimate from below, so the bounds are estimates: a larger M may be found elsewhere"
    yield "the group is taken to act on features without changing their length; translations are left out"
    if as_given:
        yield as_given
    if tail:
        yield "what follows the last site counts as one more layer, without a branch"
    branches = [ace.branch(name) for name in ace.nodes]
    every = [part for branch in branches for part in parts(branch)]
    if any(isinstance(part, nn.BatchNorm1d) for part in every):
        yield f"{Norm.__name__} counts with its running statistics, as in evaluation; a training step has others"
    if any(getattr(part, "bias", None) is not None for part in every):
        yield "branches have biases, so B is of this batch: what they give for 0 counts as a share of what they read"
    by_themselves = [name for name in ace.nodes if isinstance(ace.branch(name), AddsItself)]
    if by_themselves:
        yield f"what branches give that add themselves is not seen; no bound, for {', '.join(by_themselves)}"
    for name in ace.nodes:
        if name not in by_themselves and (kinds := unknown(ace.branch(name))):
            yield f"{name}: no Lipschitz constant is known for {', '.join(kinds)} in its branch; no bound"
    chained = [site.name for site in ace.sites if len(_path(ace, site)) > 1]
    if chained:
        told = ", ".join(chained)
        yield f"the theorems' branches read what their layer reads; B is along the chain of branches at {told}"
    for name, read in seen.reads.items():
        if read.times > 1:
            yield f"{name} takes part {read.times} times in a forward, and in the theorems once; no bound"
