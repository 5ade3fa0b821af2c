"""What is told of a model that a script attaches itself: a line when it is attached, its budget, a table at the end.

``ace-patch run`` and patched scripts tell the same, and more of the process around it; then this one is silent.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..contract.hookspecs import hookimpl
from ..later import later
from ..plugins.registry import registry
from ..telling import quiet, say
from .recorder import RECORDER

if TYPE_CHECKING:
    from torch import nn


class Announcer:
    """An observer of all attached models of the process."""

    def __init__(self) -> None:
        self.silent = False
        """Somebody else tells."""
        self._budgets_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if self._speaks(model):
            say(banner(model))

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        if self._speaks(model):
            self.tell_budget(model, step)

    @hookimpl(tryfirst=True)  # before the recorder closes the record
    def ace_finished(self, model: nn.Module) -> None:
        record = RECORDER.records.get(model)
        if record is not None and not record.finished and record.steps and self._speaks(model):
            later("ace_plugins.report.tables").print_run(record.to_dict())

    def tell_budget(self, model: nn.Module, step: int) -> None:
        """Once, when it is known."""
        ace: Any = model.ace
        if ace.config.paced and model not in self._budgets_told and ace.budget.settled(step):
            self._budgets_told.add(model)
            say(f"budget: {ace.budget}")

    def _speaks(self, model: nn.Module) -> bool:
        ace: Any = model.ace
        told: bool = ace.config.tell and not self.silent and not quiet()
        return told and later("ace_plugins.engine.distributed").rank() == 0


def banner(model: nn.Module, commit: str = "") -> str:
    """What was attached to what; ``commit`` says which state of its upstream the model comes from."""
    now = later("ace_plugins.report.status").status(model)
    ace: Any = model.ace
    plugin = registry().plugins.get(now.adapter)
    repairs = later("ace_plugins.patch.shims").REPAIRS
    shims = ", ".join(shim.name for shim in repairs.active(plugin)) if plugin is not None else ""
    return (
        f"{now.adapter}{commit}: attached to {type(model).__name__}, {len(now.sites)} sites, "
        f"{now.upstream_parameters:,} parameters + {now.ace_parameters:,} of ACE, {ace.config.summary}"
        + (f"; shims: {shims}" if shims else "")
    )


ANNOUNCER = Announcer()
