"""What ACE is doing to a model, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..contract.sites import Stem
from ..engine.state import find, unwrap
from .record import RECORDER
from .tables import shown


@dataclass(frozen=True)
class SiteStatus:
    """One site: its gamma, lambda and u, how many parameters its branch has, and a verdict."""

    name: str
    module: str
    gamma: float
    lambda_: float
    u: float
    branch_parameters: int
    verdict: str = ""
    """As in the table at the end of a run; empty before the first step."""


@dataclass(frozen=True)
class Status:
    """What ACE is doing to a model. In mode "off" there are no sites."""

    adapter: str
    mode: str
    steps: int
    landed: bool
    upstream_parameters: int
    ace_parameters: int
    stem_parameters: int
    sites: tuple[SiteStatus, ...]
    verdict: str = ""
    """Of the whole: what the user should know, with what to do; empty if there is nothing to say."""
    branches_in_eval: bool = False
    """Whether ``model.eval()`` includes the branches, so that they are deployed."""

    def __str__(self) -> str:
        """A few lines for people."""
        if not self.sites:
            return f"no ACE: {self.upstream_parameters:,} parameters"
        width = max(len(site.name) for site in self.sites)
        landed = ", landed" if self.landed else ""
        head = (
            f"ACE {self.mode} ({self.adapter}), {self.steps:,} steps{landed}, "
            f"{self.upstream_parameters:,} + {self.ace_parameters:,} parameters"
        )
        rows = (
            f"  {s.name:{width}}  gamma {s.gamma:8.4f}  lambda {s.lambda_:8.4f}{self._slack(s)}  {s.verdict}".rstrip()
            for s in self.sites
        )
        return "\n".join([head, *rows, *([self.verdict] if self.verdict else [])])

    def _slack(self, site: SiteStatus) -> str:
        return f"  u {site.u:7.4f}" if "u" in shown(self.mode) else ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with lambda under its own name."""
        plain = dataclasses.asdict(self)
        plain["sites"] = [{("lambda" if k == "lambda_" else k): v for k, v in site.items()} for site in plain["sites"]]
        return plain


def status(model: nn.Module) -> Status:
    """Per site gamma, lambda, u and branch parameters. A model without ACE has mode "off" and no sites."""
    model = unwrap(model)
    ace = find(model)
    total = sum(p.numel() for p in model.parameters())
    if ace is None:
        return Status("", "off", 0, False, total, 0, 0, ())
    added = sum(p.numel() for p in ace.parameters())
    values = zip(*ace.duals.snapshot(ace.gamma).tolist(), strict=True)
    run = RECORDER.of(model).to_dict() if ace.duals.count else None
    verdicts = [site["verdict"] for site in run["sites"]] if run else [""] * len(ace.sites)
    sites = tuple(
        SiteStatus(site.name, site.module, gamma, lambda_, u, _count(ace.branch(site.name)), word)
        for site, (gamma, lambda_, u), word in zip(ace.sites, values, verdicts, strict=True)
    )
    stems = sum(_count(ace.branch(name)) for name, node in ace.nodes.items() if isinstance(node, Stem))
    steps, plain = ace.duals.count, total - added
    verdict, mode = run["verdict"] if run else "", ace.config.mode
    in_eval = ace.config.branches_in_eval
    return Status(ace.adapter, mode, steps, ace.landed, plain, added, stems, sites, verdict, in_eval)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
