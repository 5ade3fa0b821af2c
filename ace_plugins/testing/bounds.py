"""The paper's two bounds: on the change from dropping the branches, and on the equivariance error.

The theorems are about consecutive layers, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
state "0 at 0", but its proof needs this: the proof bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..contract.sites import Tap
from ..engine.branches import Flat, Norm
from ..engine.measure import convert_to_double, get_ace, hide_from_budget, use_branches
from ..engine.scheduled import PenalisedLinear
from ..engine.spectral_norm import SNLinear
from ..engine.state import Ace, unwrap
from ..errors import ConfigError
from ..plugins.registry import registry
from ..symmetry.measure import as_call, compare_orders, distance, evaluate, preserve_state
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


@torch.no_grad()
def lipschitz(branch: nn.Module) -> float:
    """Return the product of the Lipschitz constants of a branch's layers in eval mode.

    Raises ConfigError if the constant of a layer is unknown.
    """
    if isinstance(branch, Flat):
        return lipschitz(branch.inner)
    kind = parametrize.type_before_parametrizations(branch)
    if isinstance(branch, nn.Sequential) and kind is nn.Sequential:
        return math.prod(map(lipschitz, branch))
    if isinstance(branch, SNLinear):  # not exactly 1: the power iteration may lag behind training
        return float(torch.linalg.matrix_norm(branch.matrix().double(), 2))
    if isinstance(branch, nn.Linear) and kind in (nn.Linear, PenalisedLinear):
        return float(torch.linalg.matrix_norm(branch.weight.double(), 2))
    if isinstance(branch, nn.BatchNorm1d) and kind in (Norm, nn.BatchNorm1d) and branch.running_var is not None:
        scale = (branch.running_var + branch.eps).rsqrt()
        return float((scale if branch.weight is None else scale * branch.weight).abs().max())
    if kind not in SLOPES:
        raise ConfigError(f"the Lipschitz constant of {kind.__name__} is unknown")
    return SLOPES[kind]


@dataclass(frozen=True)
class Bounds:
    """Both of the paper's bounds for an attached model with its branches on, and the values measured on one batch.

    Norms are taken over all outputs with an action together. B, M and ||x|| are valid for this batch only.
    """

    theorem_1: float
    """Bound on ``measured_1``."""
    theorem_2: float
    """Bound on ``measured_2``."""
    measured_1: float
    """||f_gamma(x) - f_0(x)||: the change from dropping the branches."""
    measured_2: float
    """||rho_Y(g) f(x) - f(rho_X(g) x)||: the largest value over random group elements g without translation."""
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
    notes: tuple[str, ...]
    """Assumptions, and differences between the model and the theorems' setting."""

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as a dict for JSON."""
        return dataclasses.asdict(self)


def bounds(model: nn.Module, batch: Any, *, samples: int = 8, seed: int = 0) -> Bounds:
    """Compute the paper's bounds for an attached model with its branches on, and measure what they bound.

    B is computed: it is the product of the spectral norms of a branch's linear maps and the steepest slopes of its
    nonlinearities. BatchNorm counts with its running statistics. The norm of the branch's output for input 0 (due to
    biases), divided by the norm of its input, is added.

    M is estimated from below. The branch of the k-th of L layers perturbs that layer's output; if the model's output
    changes by a_k times the perturbation, M is at least the (L - k)-th root of a_k. M also covers the growth of the
    branches' inputs from layer to layer, divided by 1 + |gamma|. By construction ``measured_1`` never exceeds
    ``theorem_1`` except by rounding; ``theorem_2`` is an estimate. Everything after the last site counts as one more
    layer with gamma = 0.

    Args:
        model: An attached model. A copy is evaluated, in float64 and eval mode where possible.
        batch: A tuple of positional arguments, a dict of keyword arguments, a `Call`, or a single argument.
        samples: Number of random group elements for ``measured_2``.
        seed: Seed of the group elements.

    Returns:
        The bounds, the measured values and the constants behind them.

    Raises:
        ConfigError: ``samples`` is below 1, the first branch reads only zeros, or the theorems do not cover the model:
            a branch reads another branch or a stem, adds itself to the output, runs twice in a forward pass, or has a
            layer with an unknown Lipschitz constant.
        AttachError: The model has no ACE attached.
    """
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    model = unwrap(model)
    constants = _find_constants(get_ace(model))
    action = registry().adapter(get_ace(model).adapter).action(model)
    copied, batch, as_given = convert_to_double(model, batch, copied=True)
    ace, (args, kwargs) = get_ace(copied), as_call(batch)
    all_gammas = dict(zip(constants, ace.gamma.tolist(), strict=True))

    def run(gammas: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the outputs that have an action, with these gammas and 0 at all other sites."""
        with torch.no_grad():
            ace.gamma.copy_(torch.tensor([gammas.get(name, 0.0) for name in constants], dtype=torch.float64))
        return action.tensors_to_compare(evaluate(copied, args, kwargs, seed))

    with torch.inference_mode(False), hide_from_budget(copied), use_branches(copied, True), preserve_state(copied):
        try:
            dropped, full = run({}), run(all_gammas)
            layers = _watch(copied, ace, partial(run, all_gammas))
            gammas = {name: all_gammas[name] for name in layers}
            first, last = next(iter(layers.values())), list(layers.values())[-1]
            norm = float(first.read.norm())
            if not norm:
                raise ConfigError("bounds: the first branch reads only zeros; use another batch")
            tail = not any(y.shape == last.output.shape and torch.equal(y, last.output) for y in full.values())
            chain = [*gammas.values(), *([0.0] if tail else [])]
            M = _estimate_growth(run, gammas, layers, len(chain))
        finally:
            run(all_gammas)
        generator = torch.Generator().manual_seed(seed)
        elements = [action.group.sample(generator, scale=0.0) for _ in range(samples)]
        output = evaluate(copied, args, kwargs, seed)
        errors = [distance(*pair)[1] for pair in compare_orders(copied, action, (args, kwargs), output, elements, seed)]
        branches = {name: constants[name] + _offset(ace.branch(name), layer.read) for name, layer in layers.items()}
    B = max(branches.values())
    notes = ["M is estimated from below, so the bounds are estimates"]
    notes += ["the group is assumed to preserve the length of features; translations are left out"]
    notes += [as_given] if as_given else []
    notes += ["everything after the last site counts as one more layer without a branch"] if tail else []
    if any(getattr(part, "bias", None) is not None for part in ace.branches.modules()):
        notes += ["branches have biases, so B is valid for this batch only: it includes their output for input 0"]
    return Bounds(
        theorem_1=theorem_1(chain, B, M, norm),
        theorem_2=theorem_2(chain, B, M, norm),
        measured_1=distance(full, dropped)[1],
        measured_2=max(errors),
        B=B,
        M=M,
        norm=norm,
        gammas=gammas,
        branches=branches,
        notes=tuple(notes),
    )


def _find_constants(ace: Ace) -> dict[str, float]:
    """Return the Lipschitz constant of every site's branch; raise ConfigError if the theorems do not cover one."""
    found = {}
    for site in ace.sites:
        if not isinstance(site.reads, Tap) or site.through is not None or site.name in ace.prepared_by:
            raise ConfigError(
                f"bounds: the branch of {site.name!r} reads another branch or a stem, or adds itself to the output: "
                "the theorems are about branches that read a layer's input"
            )
        try:
            found[site.name] = lipschitz(ace.branch(site.name))
        except ConfigError as error:
            raise ConfigError(f"bounds: branch of {site.name!r}: {error}") from error
    return found


class _Layer(NamedTuple):
    """Tensors at one site in one forward pass: input and output of the branch, and the site's output."""

    read: Tensor
    given: Tensor
    output: Tensor


def _watch(model: nn.Module, ace: Ace, run: Callable[[], object]) -> dict[str, _Layer]:
    """Return the tensors at every site during ``run``, in the order of the forward pass."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, branch: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if name in seen:
            raise ConfigError(f"bounds: {name!r} runs twice in a forward pass, and once in the theorems")
        seen[name] = args[0].detach().clone(), output.detach().clone()

    hooks = {name: partial(keep, name) for name in ace.nodes}
    handles = [ace.branch(name).register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        with outputs_of(model, ace.sites) as outputs:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: _Layer(*seen[name], output) for name, output in outputs.items()}


@torch.no_grad()
def _offset(branch: nn.Module, read: Tensor) -> float:
    """Return the norm of the branch's output for input 0, divided by the norm of the input that it reads."""
    at_zero, size = float(branch(torch.zeros_like(read)).norm()), float(read.norm())
    return at_zero / size if size else math.inf if at_zero else 0.0


def _estimate_growth(
    run: Callable[[Mapping[str, float]], dict[str, Tensor]],
    gammas: Mapping[str, float],
    layers: Mapping[str, _Layer],
    depth: int,
) -> float:
    """Estimate M from the effect of each branch on the output, and from the growth of the branches' inputs."""
    grown = float(next(iter(layers.values())).read.norm())
    found = [0.0]
    before = run({})
    for k, (name, layer) in enumerate(layers.items(), 1):
        if k > 1:
            found.append((float(layer.read.norm()) / grown) ** (1 / (k - 1)))
        grown *= 1 + abs(gammas[name])
        after = run(dict(list(gammas.items())[:k]))
        added = abs(gammas[name]) * float(layer.given.norm())
        if added and k < depth:
            found.append((distance(after, before)[1] / added) ** (1 / (depth - k)))
        before = after
    return max(found)
