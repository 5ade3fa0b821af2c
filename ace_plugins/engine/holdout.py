"""Splits the training samples: some of them judge gamma, the others train the branches.

A branch has free parameters, so it always helps on the samples that it was fitted to. Therefore each sample has one of
two *parts*. Samples that train the branches give gamma no gradient. Samples that judge gamma give the parameters of the
branches no gradient. Upstream's weights learn from all samples, through the branches too.

A hash of a sample's inputs decides its part, so the part is the same in every epoch, in any order, on every rank and
after resuming. Inputs that the script augments at random get a new hash, and so perhaps another part, in every epoch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import AceWarning
from ..symmetry.graphs import Rows

if TYPE_CHECKING:
    from .state import Ace

BITS = 20  # number of bits of the number that `draw` computes for a sample


class _Fit(threading.local):
    """Marks the rows that may train the parameters of the current branch. Each thread has its own marks."""

    def __init__(self) -> None:  # called in every thread. An attribute added later would make torch.compile recompile.
        self.rows: Tensor | None = None
        """1 for each row that trains the branch, 0 for each that judges gamma, [rows, 1]; None: all rows train it."""
        self.constant = False  # true while a branch is computed with constant parameters


FIT = _Fit()


@contextmanager
def fit_rows(rows: Tensor | None) -> Iterator[None]:
    """Let only some rows train the parameters that are used in the ``with`` block; see `_Fit.rows`."""
    before, FIT.rows = FIT.rows, rows
    try:
        yield
    finally:
        FIT.rows = before


def align(rows: Tensor, like: Tensor) -> Tensor:
    """Return ``rows``, one value per row, in the dtype of ``like`` and with its number of dimensions, to broadcast."""
    return (rows if rows.dim() == like.dim() else rows.view(-1, *[1] * (like.dim() - 1))).to(like.dtype)


class _Linear(torch.autograd.Function):
    """Computes x @ weight.T + bias. Rows with ``fit`` = 0 give weight and bias no gradient.

    The backward pass uses this function too, so the same holds for the second derivatives of models with forces.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fit: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, fit)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, fit = ctx.saved_tensors
        (gradient,) = gradients
        into_x = into_weight = into_bias = None
        if ctx.needs_input_grad[0]:
            into_x = _Linear.apply(gradient, weight.T, None, fit)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            kept = (gradient * fit).flatten(0, -2)
            into_weight = kept.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
            into_bias = kept.sum(0) if ctx.needs_input_grad[2] else None
        return into_x, into_weight, into_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. Only the rows in `FIT` train weight and bias."""
    if FIT.rows is None:
        return functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):  # autograd functions must apply autocast themselves
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    made: Tensor = _Linear.apply(x, weight, bias, align(FIT.rows, x))  # type: ignore[no-untyped-call]
    return made


def scale(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x * weight + bias, with one weight and bias per column. Only the rows in `FIT` train them."""
    assert FIT.rows is not None
    fits = (align(FIT.rows, x) > 0).expand_as(x)
    return torch.addcmul(torch.where(fits, bias, bias.detach()), x, torch.where(fits, weight, weight.detach()))


class FitLinear(nn.Linear):
    """An ``nn.Linear`` that only the rows in `FIT` train."""

    fits_rows = True

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def separate(branch: nn.Module) -> nn.Module:
    """Return the branch with every ``nn.Linear`` replaced by a `FitLinear`, which has the same parameters and keys."""
    for parent in list(branch.modules()):
        if type(parent).__module__.startswith("torch.nn.modules.") and not isinstance(parent, nn.Sequential):
            continue  # torch's own layers (attention) use the weights of their submodules directly
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Linear:
                setattr(parent, name, FitLinear(child))
    return FitLinear(branch) if type(branch) is nn.Linear else branch


def is_separable(branch: nn.Module) -> bool:
    """Return whether all modules of a branch that have parameters can be trained by only some of the rows."""
    return all(
        getattr(m, "fits_rows", False) for m in branch.modules() if next(m.parameters(recurse=False), None) is not None
    )


def apply(branch: nn.Module, x: Tensor, rows: Tensor | None, *, separable: bool) -> Tensor:
    """Return the output of a branch. Its parameters get a gradient only from the rows marked in ``rows``."""
    if rows is None or separable:
        with fit_rows(rows):
            made: Tensor = branch(x)
            return made
    # Rows that judge get the output of a second pass, with constant parameters and copies of running statistics.
    constant = {name: parameter.detach() for name, parameter in branch.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in branch.named_buffers()}
    made = branch(x)
    FIT.constant = True
    try:
        again: Tensor = torch.func.functional_call(branch, {**constant, **buffers}, (x,))
    finally:
        FIT.constant = False
    return torch.where(align(rows, made) > 0, made, again)


def draw(tensors: Sequence[Tensor], samples: Tensor) -> Tensor:
    """Return a whole number from 0 to 2^BITS - 1 for every sample, computed from its rows in these tensors.

    Args:
        tensors: Floating point tensors with one row per entry of ``samples``.
        samples: Number of the sample that each row belongs to, [rows].

    Returns:
        The numbers, [rows]: entry i belongs to sample i, and entries beyond the last sample have no meaning. The
        numbers are uniformly distributed, and depend neither on the order of the rows nor on other samples.
    """
    total = torch.zeros(len(samples), dtype=torch.int64, device=samples.device)
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(len(tensor), -1).contiguous()
        bits = flat.view(_INTEGERS[flat.dtype.itemsize]).to(torch.int64)
        factors = torch.arange(1, bits.shape[1] + 1, device=bits.device) * (2 * number + 1) * 0x9E3779B97F4A7C1 | 1
        total.index_add_(0, samples, _mix((bits * factors).sum(1)))  # sums of integers do not depend on the order
    drawn: Tensor = _mix(total) >> 12 & (2**BITS - 1)
    return drawn


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _mix(value: Tensor) -> Tensor:
    for shift, factor in ((31, 0x7FB5D329728EA185), (29, -0x61C8864680B583EB), (32, 0x2545F4914F6CDD1D)):
        value = (value ^ (value >> shift)) * factor
    return value ^ (value >> 31)


class Parts:
    """The role of each sample in one forward pass: it either judges gamma or trains the branches."""

    def __init__(self, ace: Ace, rows: Rows | None, drawn: Tensor | None) -> None:
        evidence = ace.duals.evidence
        gamma = ace.gamma
        self.ace, self.rows = ace, rows
        self.columns = {site.name: number for number, site in enumerate(ace.sites)}
        # A whole batch is one sample if its rows cannot be assigned to samples.
        drawn = evidence.batch_draw.expand(1) if drawn is None else drawn
        share = evidence.holdout * (1 - evidence.kept) * (1 - ace.duals.site_landed)
        self.fit = drawn[:, None] >= share * 2**BITS
        """True if a sample trains the branch of a site, [samples, sites]. No sample judges kept or landed sites."""
        self.judging = gamma - gamma.detach() * evidence.probing
        """gamma for judges, [sites]: in a probe its value is 0, which leaves the branch out."""
        self.fitting = torch.where(evidence.kept > 0, gamma, gamma.detach())
        """gamma for samples that train the branch, [sites]. It has a gradient only at kept sites."""
        self.gammas = torch.where(self.fit, self.fitting, self.judging)
        self._selected: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def select(self, count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return, for a tensor with ``count`` rows, ``fit`` (1 or 0) and ``gammas`` of every site, each [count, 1]."""
        if count not in self._selected:
            index = None if self.rows is None else self.rows.find(count)
            if index is None and self.rows is not None:
                warn_of_whole_batches(self.ace, f"a layer has {count} rows, the batch {len(self.rows.nodes)}")
            pair = self.fit.to(self.gammas.dtype), self.gammas
            each = [t[:1].expand(count, -1) if index is None else t[index] for t in pair]
            self._selected[count] = each[0].split(1, 1), each[1].split(1, 1)
        return self._selected[count]

    def rows_that_fit(self, name: str, count: int) -> Tensor:
        """Return for each of ``count`` rows 1 if it trains the branch of a site or stem, else 0, as [count, 1]."""
        fit, _ = self.select(count)
        # A stem that several sites share is trained by rows that judge none of them.
        return fit[self.columns[name]] if name in self.columns else torch.cat(fit, 1).amin(1, keepdim=True)

    def gamma_of_rows(self, name: str, like: Tensor) -> Tensor:
        """Return the gamma of a site for each row of ``like``, in its dtype and with as many dimensions."""
        _, gammas = self.select(len(like))
        return align(gammas[self.columns[name]], like)


def warn_of_whole_batches(ace: Ace, reason: str) -> None:
    """Warn once per model that whole batches are held out, because rows cannot be assigned to samples."""
    if not ace.passes.warned:
        ace.passes.warned = True
        warnings.warn(
            f"it is unknown which rows of a batch belong to which sample ({reason}), so ACE holds out whole batches "
            "to test the branches; if the script shuffles its data, a sample is held out in some epochs only, and the "
            "verdicts are less reliable; to avoid this, the adapter must define the samples (see 'Name the "
            "samples' in docs/adapters.md)",
            AceWarning,
            stacklevel=4,
        )


def split(ace: Ace, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parts | None:
    """Return the parts of the samples of a training forward pass, given the model's arguments.

    The result is None once mode auto has decided on all sites: all samples then train gamma and the branches.
    """
    if ace.config.mode == "auto" and not ace.duals.undecided:
        return None
    rows: Rows | None = None
    tensors: list[Tensor] = []
    if ace.samples is None:
        warn_of_whole_batches(ace, f"adapter {ace.adapter!r} does not define the group action")
    else:
        rows, tensors = ace.samples.find_samples(names, args, kwargs)
        if rows is None:
            warn_of_whole_batches(ace, f"adapter {ace.adapter!r} does not define it for these inputs")
    return Parts(ace, rows, None if rows is None else draw(tensors, rows.nodes))
