"""The host's own observer, which keeps a record of every attached model and has it write its trace.

It comes in through the entry point group like anyone's, and so this must not import torch.
"""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.hookspecs import hookimpl
from ..errors import AceWarning
from ..later import later
from ..settings.sources import RUNS
from .record import Record
from .trace import finite

if TYPE_CHECKING:
    from torch import nn

    from ..engine.state import Ace
    from ..symmetry.measuring import Call


class Recorder:
    """The records of this process."""

    def __init__(self) -> None:
        self.records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
        self.home = Path()
        """The folder whose runs these are: the current one, or a patched checkout."""
        self.about: dict[str, Any] = {}
        """What a record says of its run besides: upstream and its commit, where settings come from."""

    def of(self, model: nn.Module) -> Record:
        """The record of an attached model. In a forked process it begins anew."""
        record = self.records.get(model)
        if record is None or record.process != os.getpid():
            record = self.records[model] = Record(model, _ace(model))
        return record

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        ace = _ace(model)
        record = self.of(model)
        if not record.begun:
            self._begin(model, record)
        record.pass_step(step)
        record.history.record(record.position, record.snapshot())
        batch, ace.batch = ace.batch, None
        if record.finished or not record.read:
            return
        error = None if batch is None else _measured(model, record, batch)
        if record.trace is not None and (batch is not None or ace.config.traces(step) or record.new_landings()):
            record.write(**_observed(ace), **({} if error is None else {"error": error}))

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        record = self.records.pop(model, None)
        if record is not None:
            record.finish()

    def _begin(self, model: nn.Module, record: Record) -> None:
        """At the first step: by then processes that train together have found each other."""
        record.begun = True
        record.leads = later("ace_plugins.engine.distributed").rank() == 0
        if record.leads and record.config.trace and os.environ.get("ACE_TRACE") != "0":
            record.open_trace(Path(os.environ.get("ACE_RUNS") or self.home / RUNS), self.about)
            # Holds the record, never the model: a model dropped inside a function still gets its last line.
            weakref.finalize(model, record.finish)


def _ace(model: nn.Module) -> Ace:
    ace: Any = model.ace
    found: Ace = ace
    return found


def _observed(ace: Ace) -> dict[str, Any]:
    """What the last step was made of, as numbers."""
    seen = ace.observed
    told: dict[str, Any] = {}
    if seen.loss is not None:
        told["loss"] = finite(float(seen.loss))
    if seen.gradient is not None:
        told["gradient"] = [finite(value) for value in seen.gradient.tolist()]
    if seen.rates:
        told["lr"] = [finite(float(rate)) for rate in seen.rates]
    return told


def _measured(model: nn.Module, record: Record, batch: Call | Exception) -> dict[str, Any] | None:
    """How far the model with its branches is from equivariant, on a batch it has just trained on."""
    if not record.measurable:
        return None
    try:
        if isinstance(batch, Exception):
            raise batch
        found = later("ace_plugins.engine.measuring").equivariance_error(model, batch, branches_on=True)
    except Exception as error:
        record.measurable = False
        warnings.warn(
            f"the equivariance error of {type(model).__name__} cannot be measured: {error}; training goes on",
            AceWarning,
            stacklevel=2,
        )
        return None
    told = {name: finite(v) if isinstance(v, float) else v for name, v in found.to_dict().items()}
    record.errors.append({"step": record.steps, **told})
    return told


RECORDER = Recorder()
