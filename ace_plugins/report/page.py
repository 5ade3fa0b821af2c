"""Builds the report of runs as one HTML file without scripts, fonts or network access, or as JSON-compatible data.

The templates in ``templates/`` escape everything that comes from a run.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from .. import __version__
from ..output import publish
from ..settings.config import LEVEL, SETTINGS
from .charts import LINES_AT_MOST, Series, draw_heat_map, draw_lines, draw_sparkline, is_drawable, needs_log
from .runs import QUANTITIES, SavedRun, find_run, read_run
from .tables import TableData, build_site_table, format_count, format_duration, format_number
from .trace import shorten_path
from .verdicts import RunOutcome, judge_saved

TEMPLATES = Path(__file__).with_name("templates")
PAGE, PAGE_OF_MANY = "report.html", "ace-report.html"
MEANINGS = ("share of its branch that a layer uses", "pull of the constraint", "slack of a layer")
NAMED = 6  # largest number of layers that are listed beside a verdict


@dataclass(frozen=True)
class Chart:
    """A chart with its caption. If a picture would show nothing, ``text`` is shown instead."""

    title: str
    remark: str
    svg: Markup | str = ""
    text: str = ""


def write_report(
    *runs: str | os.PathLike[str] | SavedRun,
    out: str | os.PathLike[str] | None = None,
    before: Sequence[Markup] = (),
    title: str = "",
) -> Path:
    """Write an HTML report of one or more runs, as ``ace-patch report`` does.

    The page is one file that needs nothing else. It shows for each run its outcome with a verdict on every site, gamma,
    lambda and u over time, the loss, the equivariance error and the settings; several runs are also compared.

        from ace_plugins import write_report
        write_report()                                  # the newest run in .ace/runs
        write_report("first/.ace/runs", "second/.ace/runs", out="both.html")

    Args:
        runs: Folders of runs, or folders that contain runs, of which the newest is taken. Default: the newest run in
            .ace/runs.
        out: File to write. Default: report.html in the folder of the run, or ace-report.html in the current folder if
            there are several runs.
        before: Sections of HTML that precede the runs, as returned by `render_template`.
        title: Title of the page. Default: the titles of the runs.

    Returns:
        Path of the file.

    Raises:
        AceError: If a folder has no run, or the file cannot be written.
    """
    if not runs and not before:
        runs = (find_run(None),)
    read = [run if isinstance(run, SavedRun) else read_run(find_run(Path(run))) for run in runs]
    if out is None:
        out = read[0].folder / PAGE if len(read) == 1 and not before else Path(PAGE_OF_MANY)
    publish(out, render_report(read, before=before, title=title).encode())
    return Path(out)


def render_report(runs: Sequence[SavedRun], *, before: Sequence[Markup] = (), title: str = "") -> str:
    """Return the page as HTML."""
    sections = list(before)
    if len(runs) > 1:
        sections.append(_render_side_by_side(runs, alone=not sections))
    sections += [_render_run(run, alone=not sections and len(runs) == 1) for run in runs]
    return render_template(
        TEMPLATES / "page.html",
        title=title or "ACE: " + "; ".join(run.title for run in runs),
        sections=sections,
        footer=f"Written by ace-patch report {__version__} on {time.strftime('%Y-%m-%d %H:%M')}.",
    )


def render_template(template: Path, **data: Any) -> Markup:
    """Render a template as a part of the page. Templates may import macros of ``parts.html``; all data is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return Markup(environment.get_template(template.name).render(data))


def _render_run(run: SavedRun, *, alone: bool) -> Markup:
    outcome = judge_saved(run)
    lines = [list(zip(run.steps, gamma, strict=True)) for gamma in run.values["gamma"]]
    pictures = [draw_sparkline(points) for points in lines if points]
    return render_template(
        TEMPLATES / "run.html",
        alone=alone,
        run=run,
        outcome=outcome,
        folder=shorten_path(run.folder),
        facts=_list_facts(run),
        verdicts=[(word, meaning, _list_sites(outcome, word)) for word, meaning in outcome.meanings.items()],
        charts=[*_draw_sites(run), *_draw_training(run)],
        events=[f"step {step:,}: {event}" for step, event in run.events],
        table=build_site_table(outcome.sites, run.mode, pictures, "gamma over time") if pictures else None,
        properties=_list_properties(run),
    )


def _list_facts(run: SavedRun) -> list[tuple[str, str, str]]:
    """Return the most important numbers of a run, each as a tuple of name, number and remark."""
    facts = [("steps", f"{run.length:,}", "finished" if run.end is not None else "no end in the trace")]
    if run.duration:
        pace = f"{format_number(run.length / run.duration, 3)} steps per second"
        facts.append(("time", format_duration(run.duration), pace))
    sizes = [(abs(v), site) for site, v in zip(run.sites, run.last("gamma"), strict=True) if math.isfinite(v)]
    if sizes:
        size, site = max(sizes)
        facts.append(("largest |gamma|", format_number(size, 3), site if size else "every layer"))
    for name, points, more in (("training loss", run.loss, ""), ("equivariance error", run.errors, run.group)):
        if points:
            first = f"{format_number(points[0][1], 3)} at step {points[0][0]:,}"
            facts.append((name, format_number(points[-1][1], 3), ", ".join(filter(None, (first, more)))))
    return facts


def _list_sites(outcome: RunOutcome, verdict: str) -> str:
    names = outcome.find_sites(verdict)
    if len(names) == len(outcome.sites) > 1:
        return "every layer"
    return ", ".join(names) if len(names) <= NAMED else f"{len(names)} of {len(outcome.sites)} layers"


def _draw_sites(run: SavedRun) -> list[Chart]:
    if not run.steps:
        return []
    charts = [
        _draw_quantity(run, name, remark, run.steps, run.values[name])
        for name, remark in zip(QUANTITIES, MEANINGS, strict=True)
        if run.mode != "auto" or name == "gamma"
    ]
    if run.log_e:
        charts.append(_draw_evidence(run))
    if run.gradients:
        steps, rows = zip(*run.gradients, strict=True)
        remark = "of the loss at gamma: below 0 a larger gamma would help"
        charts.append(_draw_quantity(run, "gradient", remark, steps, list(zip(*rows, strict=True))))
    return charts


def _draw_evidence(run: SavedRun) -> Chart:
    """Draw the evidence for each site in mode auto, and the boundary above which one site alone is kept."""
    steps, rows = zip(*run.log_e, strict=True)
    boundary = math.log10(len(run.sites) / LEVEL)
    remark = "that a branch helps on held-out samples (log10 of the e-value); "
    if len(run.sites) == 1:
        remark += f"above {boundary:.1f} the site is kept"
    else:  # e-BH: the more sites pass together, the less each one needs
        remark += f"above {boundary:.1f} a site is kept alone, all sites together above {-math.log10(LEVEL):.1f}"
    values = [[value / math.log(10) for value in site] for site in zip(*rows, strict=True)]
    if len(values) >= LINES_AT_MOST:
        return Chart("evidence", remark, draw_heat_map("evidence", run.sites, steps, values))
    series = [Series(name, list(zip(steps, site, strict=True))) for name, site in zip(run.sites, values, strict=True)]
    series.append(Series("boundary", [(steps[0], boundary), (steps[-1], boundary)]))
    return Chart("evidence", remark, draw_lines("evidence", series, zero=True))


def _draw_quantity(
    run: SavedRun, name: str, remark: str, steps: Sequence[int], values: Sequence[Sequence[float]]
) -> Chart:
    """Draw a quantity of every site. ``values`` has one series per site, with one value per step."""
    finite = [value for site in values for value in site if math.isfinite(value)]
    if not finite:
        return Chart(name, remark, text="Not in the trace.")
    if min(finite) == max(finite):
        return Chart(name, remark, text=f"{format_number(finite[0])} for every layer, throughout.")
    title = f"{name} of {format_count(len(run.sites), 'layer')} over {format_count(run.length, 'step')}"
    if len(run.sites) > LINES_AT_MOST:
        return Chart(name, remark, draw_heat_map(title, run.sites, steps, values))
    noisy = name == "gradient"
    lines = [list(zip(steps, site, strict=True)) for site in values]
    series = [Series(site, points, noisy) for site, points in zip(run.sites, lines, strict=True)]
    return Chart(name, remark, draw_lines(title, series, zero=True, events=[step for step, _ in run.events]))


def _draw_training(run: SavedRun) -> list[Chart]:
    charts = []
    events = [step for step, _ in run.events]
    if is_drawable(run.loss):
        svg = draw_lines("training loss", [Series("loss", run.loss, noisy=True)], events=events)
        charts.append(Chart("training loss", "as the script computed it", svg))
    if is_drawable(run.errors):
        zero = not needs_log(value for _, value in run.errors)
        svg = draw_lines("equivariance error", [Series("error", run.errors)], zero=zero, marks=True, events=events)
        charts.append(Chart("equivariance error", f"relative{f', under {run.group}' if run.group else ''}", svg))
    if run.rates:
        steps, rows = zip(*run.rates, strict=True)
        groups: dict[tuple[float, ...], list[str]] = {}  # parameter groups with the same rates share a line
        for number, values in enumerate(zip(*rows, strict=False)):
            groups.setdefault(values, []).append(str(number))
        found = {value for values in groups for value in values}
        lines = [
            Series(f"group {', '.join(names)}", list(zip(steps, values, strict=True)))
            for values, names in groups.items()
        ]
        text = f"{format_number(found.pop())} throughout." if len(found) == 1 else ""
        drawn = draw_lines("learning rate", lines[:LINES_AT_MOST], zero=True, events=events) if not text else ""
        charts.append(Chart("learning rate", "of the script's optimizer", drawn, text))
    return charts


def _list_properties(run: SavedRun) -> list[tuple[str, str]]:
    about = run.about
    tables = [about.get("origins"), about.get("versions")]
    origins, versions = (table if isinstance(table, dict) else {} for table in tables)
    command, seed = about.get("command"), about.get("seed")
    settings = [f"{k} = {v}{f' ({origins[k]})' if origins.get(k) else ''}" for k, v in run.changed.items()]
    defaults = len(SETTINGS.keys() - run.changed.keys())
    settings.append(f"{defaults} others by default" if settings else "all by default")
    return [
        ("adapter", run.adapter),
        ("started", str(about.get("started") or "").replace("T", " ")),
        ("command", shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")),
        ("seed", "" if seed is None else str(seed)),
        ("settings", "; ".join(settings)),
        ("upstream", str(about.get("upstream") or "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("lines", f"{len(run.steps):,} in the trace, up to step {run.length:,}"),
    ]


def _render_side_by_side(runs: Sequence[SavedRun], *, alone: bool) -> Markup:
    """Compare runs: settings that differ, outcomes, and curves in one chart."""
    names = name_runs(runs)
    keys = dict.fromkeys(key for run in runs for key in run.changed)
    settings = {key: [str(getattr(run.config, key)) for run in runs] for key in keys}
    u = [[value for value in run.last("u") if math.isfinite(value)] for run in runs]
    curves = {
        "training loss": ("as each script computed it", [run.loss for run in runs]),
        "largest |gamma|": ("of all layers", [run.largest_gamma() for run in runs]),
        "equivariance error": ("relative", [run.errors for run in runs]),
    }
    rows = {
        **{key: values for key, values in settings.items() if len(set(values)) > 1},
        "steps": [f"{run.length:,}{'' if run.end is not None else ', no end'}" for run in runs],
        "time": [format_duration(run.duration) for run in runs],
        "largest u": [format_number(max(values, default=math.nan)) for values in u],
        **{title: [format_number(c[-1][1]) if c else "" for c in found] for title, (_, found) in curves.items()},
        "verdicts": [_count_verdicts(judge_saved(run)) for run in runs],
    }
    charts = []
    for title, (remark, found) in curves.items():
        if len(runs) <= LINES_AT_MOST and any(map(is_drawable, found)):
            noisy = title == "training loss"
            series = [Series(name, points, noisy) for name, points in zip(names, found, strict=True)]
            charts.append(Chart(title, remark, draw_lines(title, series, zero=title == "largest |gamma|")))
    cells = [[name, *values] for name, values in rows.items() if any(values)]
    table = TableData(["", *names], cells, numbers=names)
    return render_template(TEMPLATES / "side_by_side.html", alone=alone, count=len(runs), table=table, charts=charts)


def _count_verdicts(outcome: RunOutcome) -> str:
    return ", ".join(f"{len(outcome.find_sites(word))} {word}" for word in outcome.meanings)


def name_runs(runs: Sequence[SavedRun]) -> list[str]:
    """Return a different name for each run: its label, mode, title or folder, the first of these that is unique."""
    for attribute in ("label", "mode", "title", "name"):
        names = [str(getattr(run, attribute)) for run in runs]
        if all(names) and len(set(names)) == len(runs):
            return names
    return [f"{number}: {run.title}" for number, run in enumerate(runs, 1)]


def describe_run(run: SavedRun) -> dict[str, Any]:
    """Return the outcome of a run as JSON-compatible data. `read_trace` returns the values over time."""
    outcome = judge_saved(run)
    return {
        "folder": str(run.folder),
        "about": dict(run.about),
        "changed": run.changed,
        "steps": run.length,
        "seconds": run.duration,
        "lines": len(run.steps),
        "finished": run.end is not None,
        "missing": run.missing,
        "verdict": outcome.advice,
        "sites": [{**site.to_dict(), "meaning": outcome.meanings.get(site.verdict, "")} for site in outcome.sites],
        "events": [{"step": step, "event": event} for step, event in run.events],
    }
