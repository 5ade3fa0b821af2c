"""A report of runs: as a page, and as data for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .outcome import outcome
from .page import page
from .run import QUANTITIES, Run
from .scales import evenly
from .sections import run_section, side_by_side
from .trace import finite

POINTS = 1000
"""Of every series in the data; the trace itself has all."""


def page_of(runs: Sequence[Run], *, before: Sequence[str] = (), title: str = "", made: str = "") -> str:
    """One HTML file. ``before`` are sections that come first."""
    sections = list(before)
    if len(runs) > 1:
        sections.append(side_by_side(runs, alone=not sections))
    sections += [run_section(run, alone=not sections and len(runs) == 1) for run in runs]
    return page(title or "ACE: " + "; ".join(run.title for run in runs), sections, made=made)


def data_of(run: Run) -> dict[str, Any]:
    """What the page shows, as JSON knows it: null for what is not finite."""
    found = outcome(run)
    kept = evenly(len(run.steps), POINTS)
    return {
        "folder": str(run.folder),
        "about": dict(run.about),
        "changed": run.changed(),
        "steps": run.length,
        "seconds": run.lasted,
        "lines": len(run.steps),
        "finished": run.end is not None,
        "missing": run.missing,
        "verdict": found.whole,
        "sites": [
            {
                "name": layer.name,
                "gamma": finite(layer.gamma),
                "lambda": finite(layer.lambda_),
                "u": finite(layer.u),
                "verdict": layer.verdict,
                "meaning": found.meanings.get(layer.verdict, ""),
            }
            for layer in found.layers
        ],
        "trace": {
            "step": [run.steps[place] for place in kept],
            "seconds": [finite(run.seconds[place]) for place in kept],
            **{name: [[finite(site[place]) for site in run.values[name]] for place in kept] for name in QUANTITIES},
        },
        "loss": _points(run.loss),
        "lr": [
            {"step": step, "lr": list(map(finite, rates))}
            for step, rates in (run.rates[place] for place in evenly(len(run.rates), POINTS))
        ],
        "errors": [{**point, "group": run.group} for point in _points(run.errors)],
        "events": [{"step": step, "event": text} for step, text in run.events],
    }


def _points(points: Sequence[tuple[int, float]]) -> list[Mapping[str, Any]]:
    return [
        {"step": step, "value": finite(value)}
        for step, value in (points[place] for place in evenly(len(points), POINTS))
    ]
