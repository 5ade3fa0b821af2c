"""What is known of one run, line by line of its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..settings.config import SETTINGS, Config

NAN = math.nan
QUANTITIES = ("gamma", "lambda", "u")
"""What every line has of every site."""


@dataclass
class Run:
    """What is known of one run. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]
    """What run.json says; empty if there is none."""
    config: Config | None
    """None if run.json does not say."""
    sites: list[str]
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in QUANTITIES})
    """gamma, lambda and u: of every site a value for every line."""
    loss: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, list[float]]] = field(default_factory=list)
    """The live learning rates of the script's optimizer."""
    errors: list[tuple[int, float]] = field(default_factory=list)
    """The relative equivariance error, with branches."""
    group: str = ""
    """Under which it was measured."""
    gradients: list[tuple[int, list[float]]] = field(default_factory=list)
    """Of the loss at gamma, one for every site."""
    landings: dict[int, float] = field(default_factory=dict)
    """Sites that have landed by themselves, with how hard lambda has to hold them, as the mean of ``averaged``
    gradients."""
    averaged: float = math.inf
    events: list[tuple[int, str]] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    """The last line of a run that came to its end."""
    absent: set[str] = field(default_factory=set)
    """Of gamma, lambda and u, those that a line left out."""
    missing: list[str] = field(default_factory=list)
    """What a reader should know is not there."""
    label: str = ""
    """What somebody who has many runs calls this one."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def adapter(self) -> str:
        return str(self.about.get("adapter") or "")

    @property
    def mode(self) -> str:
        return self.config.mode if self.config is not None else ""

    @property
    def title(self) -> str:
        return self.label or ", ".join(filter(None, (self.adapter, self.mode))) or self.name

    @property
    def length(self) -> int:
        """Steps, as far as the trace goes."""
        return max(self.steps, default=0)

    @property
    def lasted(self) -> float:
        """Seconds, as far as the trace goes."""
        return max((value for value in self.seconds if math.isfinite(value)), default=0.0)

    def now(self, quantity: str) -> list[float]:
        """Its last values, one for every site."""
        return [site[-1] if site else NAN for site in self.values[quantity]]

    def first(self, quantity: str) -> list[float]:
        """Its first values, one for every site."""
        return [site[0] if site else NAN for site in self.values[quantity]]

    def largest(self) -> list[float]:
        """The largest |gamma| of every line."""
        return [
            max((abs(v) for v in at if math.isfinite(v)), default=NAN) for at in zip(*self.values["gamma"], strict=True)
        ]

    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as run.json has them."""
        told = self.about.get("config")
        told = told if isinstance(told, dict) else {}
        return {key: value for key, value in told.items() if key not in SETTINGS or value != SETTINGS[key].default}

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """More lines of the trace."""
        for line in lines:
            step = _number(line.get("step"))
            if not math.isfinite(step):
                continue
            self._add(int(step), line)

    def _add(self, step: int, line: Mapping[str, Any]) -> None:
        self.steps.append(step)
        self.seconds.append(_number(line.get("seconds")))
        for name in QUANTITIES:
            told = line.get(name)
            row = [_number(value) for value in told] if isinstance(told, list) else []
            if len(row) < len(self.sites):
                self.absent.add(name)
            for number, column in enumerate(self.values[name]):
                column.append(row[number] if number < len(row) else NAN)
        if "loss" in line:
            self.loss.append((step, _number(line["loss"])))
        if isinstance(line.get("lr"), list):
            self.rates.append((step, [_number(value) for value in line["lr"]]))
        gradient = line.get("gradient")
        if isinstance(gradient, list) and len(gradient) == len(self.sites):
            self.gradients.append((step, [_number(value) for value in gradient]))
        self._land(line.get("landed"))
        error = line.get("error")
        if isinstance(error, dict):
            self.errors.append((step, _number(error.get("relative"))))
            self.group = str(error.get("group") or self.group)
        if line.get("event"):
            self.events.append((step, str(line["event"])))
        if line.get("finished"):
            self.end = line

    def _land(self, told: Any) -> None:
        sites, held = (told.get("sites"), told.get("held")) if isinstance(told, dict) else (None, None)
        if isinstance(sites, list) and isinstance(held, list) and len(sites) == len(held):
            self.landings |= {int(site): _number(value) for site, value in zip(sites, held, strict=True)}
            self.averaged = _number(told.get("gradients"))


def _number(value: Any) -> float:
    """NaN for what is no number, and for infinities: nobody can draw them."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return NAN
