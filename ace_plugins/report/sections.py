"""A run as a section of the page, and several runs side by side.

A report of runs: as a page, and as data for machines.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ..settings.config import SETTINGS
from . import page
from .charts import LINES_AT_MOST, Point, Scale, Series, evenly, heat_map, line_chart, scale_of, thinned, wants_log
from .page import page as whole_page
from .runs import QUANTITIES, Run
from .tables import duration, number, plural, shown
from .trace import finite, relative
from .verdicts import Outcome, outcome

WHAT_IS = {
    "gamma": "how much of its branch a layer uses",
    "lambda": "how hard the constraint pulls",
    "u": "the slack a layer is given",
}
NAMED = 6
"""Layers that are named beside a verdict; of more, how many."""


def run_section(run: Run, *, alone: bool = False) -> str:
    found = outcome(run)
    parts = [
        page.facts(_facts(run)),
        page.bullets(run.missing, "missing"),
        page.paragraph(found.whole, "whole"),
        page.said({word: (text, _where(found, word)) for word, text in found.meanings.items()}),
        page.charts([*_layers_over_time(run), *_training(run)]),
        page.bullets([f"step {step:,}: {text}" for step, text in run.events]),
        page.two(
            page.subheading("Layer by layer") + _table(run, found) if run.steps and run.sites else "",
            page.subheading("What the run was") + page.about(_about(run)),
        ),
    ]
    return page.section(run.title, relative(run.folder), parts, alone=alone)


def _facts(run: Run) -> list[tuple[str, str, str]]:
    state = "finished" if run.end is not None else "no end in the trace"
    told = [("steps", f"{run.length:,}", state)]
    if run.lasted:
        told.append(("time", duration(run.lasted), f"{number(run.length / run.lasted, 3)} steps a second"))
    gamma = [
        (abs(value), site) for site, value in zip(run.sites, run.now("gamma"), strict=True) if math.isfinite(value)
    ]
    if gamma:
        size, site = max(gamma)
        told.append(("largest |gamma|", number(size, 3), site if size else "every layer"))
    if run.loss:
        told.append(
            ("training loss", number(run.loss[-1][1], 3), f"{number(run.loss[0][1], 3)} at step {run.loss[0][0]:,}")
        )
    if run.errors:
        first = f"{number(run.errors[0][1], 3)} at step {run.errors[0][0]:,}"
        told.append(("equivariance error", number(run.errors[-1][1], 3), f"{first}, {run.group}".removesuffix(", ")))
    return told


def _where(found: Outcome, word: str) -> str:
    names = found.named(word)
    if len(names) == len(found.layers):
        return "every layer" if len(names) > 1 else names[0]
    return ", ".join(names) if len(names) <= NAMED else f"{len(names)} of {len(found.layers)} layers"


def _layers_over_time(run: Run) -> list[str]:
    if not run.steps:
        return []
    made = [
        page.figure(name, what, _by_layer(run, name, run.steps, run.values[name])) for name, what in WHAT_IS.items()
    ]
    if run.gradients:
        steps = [step for step, _ in run.gradients]
        values = [list(site) for site in zip(*(row for _, row in run.gradients), strict=True)]
        chart = _by_layer(run, "gradient", steps, values, noisy=True)
        made.append(page.figure("gradient", "of the loss at gamma: below 0 a larger gamma would help", chart))
    return made


def _by_layer(
    run: Run, name: str, steps: Sequence[int], values: Sequence[Sequence[float]], *, noisy: bool = False
) -> str:
    """``values``: of every site one for every step."""
    finite = [value for site in values for value in site if math.isfinite(value)]
    if not finite:
        return "Not in the trace."
    if min(finite) == max(finite):
        return f"{number(finite[0])} for every layer, throughout."
    title = f"{name} of {plural(len(run.sites), 'layer')} over {plural(run.length, 'step')}"
    if len(run.sites) > LINES_AT_MOST:
        return heat_map(title, run.sites, steps, values)
    series = [
        Series(site, list(zip(steps, at, strict=True)), noisy) for site, at in zip(run.sites, values, strict=True)
    ]
    return line_chart(title, series, zero=True, events=[(step, 0.0) for step, _ in run.events])


def _training(run: Run) -> list[str]:
    made = []
    events = [(float(step), 0.0) for step, _ in run.events]
    if _finite(run.loss):
        chart = line_chart("training loss", [Series("loss", run.loss, noisy=True)], events=events)
        made.append(page.figure("training loss", "as the script computed it", chart))
    if _finite(run.errors):
        remark = f"relative{f', under {run.group}' if run.group else ''}"
        chart = line_chart(
            "equivariance error",
            [Series("error", run.errors)],
            zero=not wants_log(map(_value, run.errors)),
            marks=True,
            events=events,
        )
        made.append(page.figure("equivariance error", remark, chart))
    rates = _rates(run)
    if rates:
        told = rates[0].points[-1][1] if len(rates) == 1 and len({value for _, value in rates[0].points}) == 1 else None
        chart = line_chart("learning rate", rates[:LINES_AT_MOST], zero=True, events=events) if told is None else ""
        picture = chart or f"{number(told or 0.0)} throughout."
        made.append(page.figure("learning rate", "of the script's optimizer", picture))
    return made


def _rates(run: Run) -> list[Series]:
    """A line for every rate; parameter groups with the same one share it."""
    lines: dict[tuple[Point, ...], list[int]] = {}
    for group in range(max((len(rates) for _, rates in run.rates), default=0)):
        points = tuple((float(step), rates[group]) for step, rates in run.rates if group < len(rates))
        if _finite(points):
            lines.setdefault(points, []).append(group)
    return [Series(f"group {', '.join(map(str, groups))}", points) for points, groups in lines.items()]


def _value(point: Point) -> float:
    return point[1]


def _finite(points: Sequence[Point]) -> bool:
    return any(math.isfinite(value) for _, value in points)


def _table(run: Run, found: Outcome) -> str:
    keys = shown(run.mode)
    rows = [
        [
            f"<code>{escape(layer.name)}</code>",
            *map(number, (layer.gamma, layer.lambda_, layer.u)[: len(keys)]),
            _spark(list(zip(run.steps, gamma, strict=True))),
            page.word(layer.verdict),
        ]
        for layer, gamma in zip(found.layers, run.values["gamma"], strict=True)
    ]
    return page.table(("layer", *keys, " gamma over time", "verdict"), rows, numbers=keys)


def _spark(points: Sequence[Point]) -> str:
    """A line of the height of a word."""
    y = scale_of([value for _, value in points], 19, 1, zero=True)
    x = Scale(points[0][0], points[-1][0], 0, 100)
    moves = "".join(
        "M" + "L".join(f"{x(step):.0f} {y(value):.1f}" for step, value in piece) for piece in thinned(points, 30)
    )
    return (
        f'<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="base" d="M0 {y(0):.1f}H100"/><path d="{moves}"/></svg>'
    )


def _about(run: Run) -> list[tuple[str, str, bool]]:
    about = run.about
    command = about.get("command")
    words = shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")
    seed = about.get("seed")
    return [
        ("adapter", run.adapter, False),
        ("started", str(about.get("started") or "").replace("T", " "), False),
        ("command", words, True),
        ("seed", "" if seed is None else str(seed), False),
        ("settings", _settings(run), False),
        ("upstream", _pairs(about.get("upstream")), False),
        ("versions", _pairs(about.get("versions")) or _pairs({"torch": about.get("torch")}), False),
        ("lines", f"{len(run.steps):,} in the trace, up to step {run.length:,}", False),
    ]


def _settings(run: Run) -> str:
    """Those that differ from the defaults, with where each came from."""
    changed = run.changed()
    if not changed:
        return "all as by default" if run.config is not None else ""
    origins = run.about.get("origins")
    origins = origins if isinstance(origins, dict) else {}
    told = [f"{key} = {value}{_remark(key, origins)}" for key, value in changed.items()]
    return "; ".join([*told, f"{len(SETTINGS.keys() - changed.keys())} others as by default"])


def _remark(key: str, origins: dict[str, Any]) -> str:
    return f" ({origins[key]})" if origins.get(key) else ""


def _pairs(told: Any) -> str:
    if not isinstance(told, dict):
        return told if isinstance(told, str) else ""
    return ", ".join(f"{key} {value}" for key, value in told.items() if value not in (None, "", [], {}))


def side_by_side(runs: Sequence[Run], *, alone: bool = True) -> str:
    """What differs between runs, what each came to, and their curves in one picture."""
    names = labels(runs)
    changed = [run.changed() for run in runs]
    keys = list(dict.fromkeys(key for each in changed for key in each))
    differing = [key for key in keys if len({str(_setting(run, key)) for run in runs}) > 1]
    found = [outcome(run) for run in runs]

    def row(what: str, of: Callable[[int], str]) -> list[str]:
        return [escape(what), *(escape(of(number)) for number in range(len(runs)))]

    rows = [
        *([escape(key), *(escape(str(_setting(run, key))) for run in runs)] for key in differing),
        row("steps", lambda n: f"{runs[n].length:,}{'' if runs[n].end is not None else ', no end'}"),
        row("time", lambda n: duration(runs[n].lasted)),
        row("largest |gamma|", lambda n: _last(list(enumerate(runs[n].largest())))),
        row("largest u", lambda n: number(max(filter(math.isfinite, runs[n].now("u")), default=math.nan))),
        row("training loss", lambda n: _last(runs[n].loss)),
        row("equivariance error", lambda n: _last(runs[n].errors)),
        row("verdicts", lambda n: _counts(found[n])),
    ]
    rows = [each for each in rows if any(each[1:])]
    curves: list[tuple[str, str, Callable[[Run], Sequence[Point]], bool]] = [
        ("training loss", "as each script computed it", lambda run: run.loss, True),
        ("largest |gamma|", "of all layers", lambda run: list(zip(run.steps, run.largest(), strict=True)), False),
        ("equivariance error", "relative", lambda run: run.errors, False),
    ]
    figures = []
    for title, remark, of, noisy in curves:
        series = [Series(name, of(run), noisy) for name, run in zip(names, runs, strict=True)]
        if len(runs) <= LINES_AT_MOST and any(_finite(each.points) for each in series):
            figures.append(page.figure(title, remark, line_chart(title, series, zero=title == "largest |gamma|")))
    parts = [page.table(("", *names), rows, numbers=names), page.charts(figures)]
    return page.section(f"{len(runs)} runs side by side", "", parts, alone=alone)


def labels(runs: Sequence[Run]) -> list[str]:
    """The shortest names that differ: what they are called, mode, adapter and mode, folder."""
    makers: list[Callable[[Run], str]] = [
        lambda run: run.label,
        lambda run: run.mode,
        lambda run: run.title,
        lambda run: run.name,
    ]
    for made in ([of(run) for run in runs] for of in makers):
        if all(made) and len(set(made)) == len(runs):
            return made
    return [f"{n}: {run.title}" for n, run in enumerate(runs, 1)]


def _setting(run: Run, key: str) -> Any:
    told = run.about.get("config")
    told = told if isinstance(told, dict) else {}
    return told.get(key, SETTINGS[key].default if key in SETTINGS else "")


def _last(points: Sequence[Point]) -> str:
    return number(points[-1][1]) if points else ""


def _counts(found: Outcome) -> str:
    return ", ".join(f"{len(found.named(word))} {word}" for word in found.meanings)


POINTS = 1000
"""Of every series in the data; the trace itself has all."""


def page_of(runs: Sequence[Run], *, before: Sequence[str] = (), title: str = "", made: str = "") -> str:
    """One HTML file. ``before`` are sections that come first."""
    sections = list(before)
    if len(runs) > 1:
        sections.append(side_by_side(runs, alone=not sections))
    sections += [run_section(run, alone=not sections and len(runs) == 1) for run in runs]
    return whole_page(title or "ACE: " + "; ".join(run.title for run in runs), sections, made=made)


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
