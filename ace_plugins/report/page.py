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
from .charts import LINES_AT_MOST, Series, draw_heat_map, draw_lines, draw_sphere, is_drawable
from .tables import TableData, build_left_table, build_site_table, format_duration, format_number
from .trace import (
    Curve,
    SavedRun,
    describe_progress,
    find_run,
    read_run,
    refuse_links,
    shorten_path,
    to_json,
    to_numbers,
)
from .verdicts import judge_saved

TEMPLATES = Path(__file__).with_name("templates")
Values = tuple[Sequence[int], Sequence[Sequence[float]]]  # steps, and for each name its values over time
PAGE, PAGE_OF_MANY = "report.html", "ace-report.html"
REMARKS = {
    "gamma": "factor of the branch in the output of a layer",
    "lambda": "force that moves gamma towards its bound",
    "u": "bound on |gamma| of a layer",
    "gradient": "of the loss with respect to gamma; if negative, a larger gamma lowers the loss",
}


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
        refuse_links(out.parent)
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

    loader = FileSystemLoader([template.parent, TEMPLATES])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    return Markup(environment.get_template(template.name).render(data))


def _render_run(run: SavedRun, *, alone: bool) -> Markup:
    outcome = judge_saved(run)
    return render_template(
        TEMPLATES / "run.html",
        alone=alone,
        run=run,
        outcome=outcome,
        folder=shorten_path(run.folder),
        facts=_list_facts(run),
        charts=_draw_charts(run),
        events=[f"step {step:,}: {event}" for step, event in run.events],
        table=build_site_table(outcome, run) if run.lines and run.sites else None,
        left=run.symmetry.get("sentence"),
        subgroups=build_left_table(run.symmetry["rows"]) if run.symmetry.get("rows") else None,
        properties=_list_properties(run),
    )


def _list_facts(run: SavedRun) -> list[tuple[str, str, str]]:
    """Return the most important numbers of a run, each as a tuple of name, number and remark."""
    remarks = [f"landed at step {run.landed_at:,}"] if run.landed_at else []
    remarks.append(run.state)
    remarks += [f"{format_duration(run.left)} left"] if run.left is not None else []
    facts = [("steps", describe_progress(run.length, run.budget, None).removesuffix(" steps"), ", ".join(remarks))]
    if run.duration:
        pace = f"{format_number(run.rate, 3)} steps per second"
        facts.append(("time", format_duration(run.duration), pace))
    sizes = [(abs(v), site) for v, site in zip(run.last("gamma"), run.sites, strict=False) if math.isfinite(v)]
    if sizes:
        size, site = max(sizes)
        facts.append(("largest |gamma|", format_number(size, 3), site if size else "every layer"))
    curves = (("training loss", run.curve("loss"), ""), ("equivariance error", run.curve("error"), run.group))
    for name, points, more in curves:
        if points:
            first = f"{format_number(points[0][1], 3)} at step {points[0][0]:,}" if len(points) > 1 else ""
            facts.append((name, format_number(points[-1][1], 3), ", ".join(filter(None, (first, more)))))
    return facts


def _draw_charts(run: SavedRun) -> list[Chart]:
    events = [step for step, _ in run.events]
    charts = []
    for name, remark in REMARKS.items():
        if run.mode != "auto" or name not in ("lambda", "u"):
            charts.append(_draw_values(name, remark, run.sites, run.per_site(name), events))
    steps, evidence = run.per_site("log_e")
    if steps:  # mode auto
        # The test is e-BH: the more sites are kept together, the less evidence each one needs.
        boundary = math.log10(len(run.sites) / LEVEL)
        several = f"the site is kept; if all sites are above {-math.log10(LEVEL):.1f}, all are kept"
        remark = f"that a branch helps on held-out samples (log10 of the e-value); above {boundary:.1f} "
        remark += several if len(run.sites) > 1 else "the site is kept"
        values = [*([value / math.log(10) for value in site] for site in evidence), [boundary] * len(steps)]
        charts.insert(1, _draw_values("evidence", remark, [*run.sites, "boundary"], (steps, values), events))
    for name, remark, curve in (
        ("training loss", "as the script computed it", run.curve("loss")),
        ("equivariance error", f"relative{f', under {run.group}' if run.group else ''}", run.curve("error")),
    ):
        if is_drawable(curve):
            charts.append(Chart(name, remark, draw_lines(name, [Series(name, curve, noisy=True)], events=events)))
    rates = [(line["step"], row) for line in run.lines if (row := to_numbers(line.get("lr")))]
    groups = list(zip(*(row for _, row in rates), strict=False))
    names, steps = [f"group {number}" for number in range(len(groups))], [step for step, _ in rates]
    charts.append(_draw_values("learning rate", "of the script's optimizer", names, (steps, groups), events))
    if points := run.symmetry.get("points"):
        remark = "of rotations about each axis, in units of that of all rotations; the ring marks the smallest"
        charts.append(Chart("equivariance error", remark, draw_sphere("equivariance error by axis", points)))
    return [chart for chart in charts if chart is not None]


def _draw_values(title: str, remark: str, names: Sequence[str], data: Values, events: Sequence[int]) -> Chart | None:
    """Draw one line per name, or a heat map for many names. A constant is given as text."""
    steps, values = data
    finite = {value for each in values for value in each if math.isfinite(value)}
    if not finite:
        return None
    if len(finite) == 1:
        return Chart(title, remark, text=f"{format_number(finite.pop())} throughout.")
    if len(names) > LINES_AT_MOST:
        return Chart(title, remark, draw_heat_map(title, names, steps, values))
    lines = (list(zip(steps, each, strict=True)) for each in values)
    series = [Series(*each, noisy=title == "gradient") for each in zip(names, lines, strict=True)]
    return Chart(title, remark, draw_lines(title, series, zero=True, events=events))


def _list_properties(run: SavedRun) -> list[tuple[str, str]]:
    about = run.about
    origins, versions, command, seed = (about.get(key) for key in ("origins", "versions", "command", "seed"))
    origins, versions = (table if isinstance(table, dict) else {} for table in (origins, versions))
    settings = [f"{k} = {v}{f' ({origins[k]})' if origins.get(k) else ''}" for k, v in run.changed.items()]
    defaults = len(SETTINGS.keys() - run.changed.keys())
    settings.append(f"{defaults} others at their defaults" if settings else "all at their defaults")
    return [
        ("adapter", run.adapter),
        ("started", str(about.get("started") or "").replace("T", " ")),
        ("command", shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")),
        ("seed", "" if seed is None else str(seed)),
        ("settings", "; ".join(settings)),
        ("upstream", str(about.get("upstream") or "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("trace", f"{len(run.lines):,} lines, up to step {run.length:,}"),
    ]


def _render_side_by_side(runs: Sequence[SavedRun], *, alone: bool) -> Markup:
    names = [run.title for run in runs]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    keys = dict.fromkeys(key for run in runs for key in run.changed)
    settings = {key: [str(getattr(run.config, key)) for run in runs] for key in keys}
    outcomes = [judge_saved(run) for run in runs]
    curves = {
        "training loss": ("as each script computed it", [run.curve("loss") for run in runs]),
        "largest |gamma|": ("of all layers", [_find_largest(run, "gamma") for run in runs]),
        "largest u": ("of all layers", [_find_largest(run, "u") for run in runs]),
        "equivariance error": ("relative", [run.curve("error") for run in runs]),
    }
    rows = {
        **{key: values for key, values in settings.items() if len(set(values)) > 1},
        "steps": [f"{run.length:,}{'' if run.state == 'finished' else f', {run.state}'}" for run in runs],
        "time": [format_duration(run.duration) for run in runs],
        **{name: [format_number(c[-1][1]) if c else "" for c in found] for name, (_, found) in curves.items()},
        "verdicts": [", ".join(f"{count} {word}" for word, count in each.counts.items()) for each in outcomes],
    }
    charts = []
    for title, (remark, found) in curves.items():
        if len(runs) <= LINES_AT_MOST and any(value for curve in found for _, value in curve if math.isfinite(value)):
            series = [Series(*each, noisy=title == "training loss") for each in zip(names, found, strict=True)]
            charts.append(Chart(title, remark, draw_lines(title, series, zero=title.startswith("largest"))))
    cells = [[name, *values] for name, values in rows.items() if any(values)]
    table = TableData(["", *names], cells, numbers=names)
    return render_template(TEMPLATES / "side_by_side.html", alone=alone, count=len(runs), table=table, charts=charts)


def _find_largest(run: SavedRun, quantity: str) -> Curve:
    """Return the largest |value| over all sites for each line of the trace, with the line's step."""
    rows = [filter(math.isfinite, to_numbers(line[quantity])) for line in run.lines]
    return [(line["step"], max(map(abs, row), default=math.nan)) for line, row in zip(run.lines, rows, strict=True)]


def describe_run(run: SavedRun) -> dict[str, Any]:
    """Return the outcome of a run as JSON-compatible data. `read_trace` returns the values over time."""
    outcome = judge_saved(run)
    found: dict[str, Any] = to_json(
        {
            "folder": str(run.folder),
            "about": dict(run.about),
            "changed": run.changed,
            "steps": run.length,
            "seconds": run.duration,
            "lines": len(run.lines),
            "finished": run.state == "finished",
            "interrupted": run.state == "interrupted",
            "missing": run.missing,
            "verdict": outcome.advice,
            "sites": [{**site.to_dict(), "meaning": outcome.meanings.get(site.verdict, "")} for site in outcome.sites],
            "symmetry_left": run.symmetry.get("sentence"),
            "events": [{"step": step, "event": event} for step, event in run.events],
        }
    )
    return found
