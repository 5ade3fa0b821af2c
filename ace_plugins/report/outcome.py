"""How the run of one model ended: gamma, lambda and u of its sites, and a verdict on each and on the whole."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..settings.config import Config
from ..engine.duals import Duals
from .history import History
from ..engine.state import Ace
from .trace import TRACE, finite
from .verdicts import NEAR, verdict


@dataclass
class Outcome:
    """The small part of an attached model that says how it ended, also when the model itself is gone."""

    model: str
    adapter: str
    config: Config
    sites: list[str]
    gamma: Tensor
    duals: Duals
    history: History = field(default_factory=History)

    @classmethod
    def of(cls, model: nn.Module, ace: Ace) -> Outcome:
        sites = [site.name for site in ace.sites]
        return cls(type(model).__name__, ace.adapter, ace.config, sites, ace.gamma, ace.duals)

    @property
    def mode(self) -> str:
        return self.config.mode

    def to_dict(self) -> dict[str, Any]:
        verdicts = self.verdicts()
        values = zip(
            self.sites,
            self.gamma.tolist(),
            self.duals.lambda_.tolist(),
            self.duals.u.tolist(),
            verdicts,
            strict=True,
        )
        folder = TRACE.folders.get(self.duals)
        errors = [error for error in TRACE.errors.get(self.duals, ()) if error is not None]
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.mode,
            "steps": self.duals.count,
            "landed": self.duals.landed,
            "verdict": self._whole(verdicts),
            "folder": None if folder is None else relative(folder),
            "errors": [errors[0], errors[-1]] if len(errors) > 1 else errors,
            "sites": [
                {"name": name, "gamma": finite(g), "lambda": finite(la), "u": finite(u), "verdict": said}
                for name, g, la, u, said in values
            ],
        }

    def verdicts(self) -> list[str]:
        """Per site a key of `MEANING`."""
        histories = self.history.per_site() or [([], [])] * len(self.sites)
        now = zip(self.gamma.tolist(), self.duals.lambda_.tolist(), self.duals.u.tolist(), strict=True)
        return [
            verdict(
                self.mode,
                [*gamma, last_gamma],
                [*lambda_, last_lambda],
                self.config.epsilon if self.mode == "bounded" else u,
                landed=self.duals.landed,
            )
            for (gamma, lambda_), (last_gamma, last_lambda, u) in zip(histories, now, strict=True)
        ]

    def _whole(self, verdicts: list[str]) -> str:
        """What the user should know about how the run ended; empty if there is nothing to say."""
        if "diverged" in verdicts or "too short" in verdicts:
            return ""
        if self.mode == "strict":
            return self._strict_verdict()
        u = self.duals.u.detach()
        most = int(u.argmax())
        if self.mode == "resilient" and float(u[most]) > max(0.01, 1.1 * float(u.median())):
            return f"{self.sites[most]} breaks the symmetry the most: u = {float(u[most]):.3g}"
        return ""

    def _strict_verdict(self) -> str:
        largest = float(self.gamma.detach().abs().max())
        if self.duals.landed:
            return ""
        if largest <= NEAR:
            return "the symmetry holds: gamma is at 0" if largest < 0.01 else ""
        told = (
            f"|gamma| is still up to {largest:.2f}: the f_eq that model.eval() shows is not yet the model that trains, "
            "and early stopping or a falling learning rate can leave it there; "
        )
        if self.config.land_at:
            return told + f"land_at = {self.config.land_at:,} was not reached in {self.duals.count:,} steps"
        return told + (
            "on a short budget let gamma move faster and land, "
            f"as with --preset short --land-at {max(1, self.duals.count // 3)}"
        )


def relative(path: str | os.PathLike[str]) -> str:
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone, or on another drive
        return os.fspath(path)
