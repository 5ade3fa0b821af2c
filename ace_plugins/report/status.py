"""The state of ACE in a model, as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..contract.sites import Stem
from ..engine.state import find, unwrap
from .record import RECORDER
from .tables import build_site_table
from .trace import to_json
from .verdicts import RunOutcome, SiteOutcome


@dataclass(frozen=True)
class SiteStatus(SiteOutcome):
    """The state of one site. ``verdict`` is empty before the first training step."""

    module: str = ""
    """Name of the submodule that the branch is added to."""
    branch_parameters: int = 0
    """Number of parameters of the branch."""


@dataclass(frozen=True)
class Status:
    """The state of ACE in a model. In mode "off" there are no sites. ``str(status)`` is a table."""

    adapter: str
    mode: str
    steps: int
    """Number of training steps so far."""
    landed: bool
    """True if every site has landed: its gamma stays 0."""
    upstream_parameters: int
    ace_parameters: int
    stem_parameters: int
    """Number of parameters that several branches share; ``ace_parameters`` includes them."""
    sites: tuple[SiteStatus, ...]
    verdict: str = ""
    """Advice about the whole run, one sentence; empty without advice."""
    branches_in_eval: bool = False
    """True if branches stay active after ``model.eval()``, and so are part of the deployed model."""

    def __str__(self) -> str:
        if not self.sites:
            return f"no ACE: {self.upstream_parameters:,} parameters"
        head = (
            f"ACE {self.mode} ({self.adapter}), {self.steps:,} steps{', landed' if self.landed else ''}, "
            f"{self.upstream_parameters:,} + {self.ace_parameters:,} parameters"
        )
        table = str(build_site_table(RunOutcome(self.mode, self.sites))).replace("\n", "\n  ")
        return "\n".join([head, f"  {table}", *([self.verdict] if self.verdict else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON-compatible data, with "lambda" for "lambda_", and None for NaN and infinities."""
        plain: dict[str, Any] = to_json(dataclasses.asdict(self))
        plain["sites"] = [{("lambda" if k == "lambda_" else k): v for k, v in site.items()} for site in plain["sites"]]
        return plain


def status(model: nn.Module) -> Status:
    """Return the state of ACE in a model: gamma, lambda, u, parameters and verdicts.

        from ace_plugins import status
        print(status(model))               # a table
        status(model).sites[0].gamma       # a number

    Args:
        model: A model, also one wrapped in DataParallel, DistributedDataParallel or torch.compile.

    Returns:
        The state now. A model without ACE has mode "off" and no sites.
    """
    model = unwrap(model)
    ace = find(model)
    total = _count(model)
    if ace is None:
        return Status("", "off", 0, False, total, 0, 0, ())
    values = zip(*ace.duals.snapshot(ace.gamma).tolist(), strict=True)
    outcome = RECORDER.get_record(model).judge() if ace.duals.count else None
    blank = [SiteOutcome(site.name, *numbers) for site, numbers in zip(ace.sites, values, strict=True)]
    return Status(
        adapter=ace.adapter,
        mode=ace.config.mode,
        steps=ace.duals.count,
        landed=ace.landed,
        upstream_parameters=total - _count(ace),
        ace_parameters=_count(ace),
        stem_parameters=sum(_count(ace.branch(name)) for name, node in ace.nodes.items() if isinstance(node, Stem)),
        sites=tuple(
            SiteStatus(**vars(found), module=site.module, branch_parameters=_count(ace.branch(site.name)))
            for site, found in zip(ace.sites, outcome.sites if outcome else blank, strict=True)
        ),
        verdict=outcome.advice if outcome else "",
        branches_in_eval=ace.in_eval,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
