"""Commands about runs: ``compare`` several, ``report`` on finished ones, ``watch`` one that is still training."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..compare.experiment import Experiment, parse_grid, parse_metric, parse_runs, parse_seeds, read_experiments
from ..compare.page import is_comparison, print_comparison, read_comparison, render_comparison
from ..compare.plan import Comparison, Store, plan_comparison
from ..compare.results import RUNS, execute
from ..contract.upstreams import Metric
from ..errors import AceError
from ..output import printable
from ..report.page import PAGE, describe_run, write_report
from ..report.tables import format_duration
from ..report.terminal import SECONDS, print_report, watch_run
from ..report.trace import find_run, read_run, shorten_path
from ..settings.config import KINDS
from .options import FILE, FOLDER, PATH, Items, ScriptCommand, SettingType, adapters, as_json, files, print_json

AT_LEAST_1, POSITIVE = click.IntRange(min=1), click.FloatRange(min=0, min_open=True)


def _files_and_adapters(ctx: click.Context, param: Any, incomplete: str) -> Items:
    return [*files(ctx, param, incomplete), *adapters(ctx, param, incomplete)]  # the shell drops items before a file


@click.command(cls=ScriptCommand)
@click.argument("what", metavar="ADAPTER|FILE.toml", shell_complete=_files_and_adapters)
@click.argument("words", nargs=-1, type=click.Path(), metavar="[-- SCRIPT [ARGS]...]")
@click.option("--seeds", type=parse_seeds, metavar="N|A,B,C", help="Number of seeds, or a list of seeds.  [default: 5]")
@click.option(
    "--runs",
    type=parse_runs,
    metavar="NAME,...",
    help="What to compare: modes (off, auto, strict, ...), presets (paper, fit), the control branches, or your own "
    f"settings as NAME:KEY=VALUE,KEY=VALUE. The first run is the baseline.  [default: {RUNS}]",
)
@click.option(
    "--grid",
    multiple=True,
    type=parse_grid,
    metavar="KEY=VALUE,VALUE...",
    help="Values of an option of the script, or of a setting of ACE (also as ace.KEY). Each run gets the value that "
    "is best for the first seed. The first metric whose name starts with 'validation' decides. Can be repeated, for "
    "all combinations.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    type=parse_metric,
    metavar="NAME=REGEX",
    help="Regular expression that finds a printed result; {number} stands for the value. The last match counts. "
    "Can be repeated; runs are compared by the first metric.",
)
@click.option(
    "--budget",
    type=(BUDGET := SettingType(KINDS["budget"])),
    metavar=BUDGET.name,
    help="Length of a run, in optimizer steps or as '600 epochs', for all runs that have no budget.",
)
@click.option("--higher", is_flag=True, help="Higher values are better, for all metrics given with --metric.")
@click.option("--jobs", type=AT_LEAST_1, help="Simultaneous runs.  [default: one per GPU, or per two processors]")
@click.option("--threads", type=AT_LEAST_1, help="CPU threads of each run.  [default: an equal share]")
@click.option("--budget-scale", type=POSITIVE, default=1.0, help="Multiply the epochs in FILE.toml by this factor.")
@click.option(
    "--on", default="here", metavar="here|ray|ADDRESS", help="This machine (default), local Ray, or a Ray cluster."
)
@click.option("--out", type=FOLDER, help="Folder for the results.  [default: a folder in .ace/compare]")
@click.option("--dry-run", is_flag=True, help="List the runs without starting any.")
@as_json
def compare(
    what: str,
    words: tuple[str, ...],
    metrics: tuple[Metric, ...],
    grid: tuple[tuple[str, tuple[str, ...]], ...],
    budget: int | str | None,
    higher: bool,
    jobs: int | None,
    threads: int | None,
    budget_scale: float,
    on: str,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Compare a script with and without ACE over several seeds.

    Trains once for each run and seed, reads the results that the script prints, and compares them seed by seed.

    \b
    ace-patch compare segnn --seeds 5 --runs off,auto -- main.py --dataset=nbody --epochs=150
    ace-patch compare experiments/nbody.toml --budget-scale 0.1

    Call the command in the folder where you would call the script. Each run gets a copy of the code and links to the
    data, so your files stay unchanged. If you repeat the command, it continues where it stopped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if len(dict(grid)) < len(grid):
        raise AceError("--grid: expected different keys; give all values of a key at once, as in --grid lr=5e-4,1e-3")
    given |= {"metrics": tuple(replace(metric, higher=higher) for metric in metrics), "grid": dict(grid)}
    given = {name: value for name, value in given.items() if value}
    if not what.endswith(".toml"):
        experiments = [Experiment(what, words, parse_runs(RUNS))]
    elif words:
        raise AceError(f"{what} contains the command: expected nothing after '--', found {words[0]!r}")
    else:
        experiments = read_experiments(Path(what), budget_scale)
    if budget is not None:
        runs = given.pop("runs", None)
        experiments = [replace(each, runs=_with_budget(runs or each.runs, budget)) for each in experiments]
    results = []
    # All comparisons are checked before the first one starts.
    for comparison in [plan_comparison(replace(experiment, **given)) for experiment in experiments]:
        if comparison.label:
            click.echo(comparison.label, err=as_json)
        folder = out / comparison.label if out else None
        if dry_run:
            _list_trials(comparison, folder)
            continue
        results.append(result := execute(comparison, jobs=jobs, threads=threads, on=on, out=folder))
        if not as_json:
            print_comparison(result)
            click.echo(f"Results: {shorten_path(result.folder)}")
    if as_json and not dry_run:
        print_json(results[0].to_dict() if len(results) == 1 else [result.to_dict() for result in results])
    if any(result.failed for result in results):
        sys.exit(1)


def _with_budget(runs: Mapping[str, Mapping[str, Any]], budget: int | str) -> dict[str, Mapping[str, Any]]:
    """Add a budget to every run with ACE that does not set one."""
    return {name: s if s.get("mode") == "off" else {"budget": budget, **s} for name, s in runs.items()}


def _list_trials(comparison: Comparison, out: Path | None) -> None:
    store = Store(comparison, out)
    for line in comparison.describe_grid():
        click.echo(line)
    for each in filter(None, (comparison.search, comparison)):
        finished = Store(each, store.folder).load()
        if each is comparison and comparison.grid:
            click.echo("then, with the values that were picked:")
        for trial in each.trials:
            state = f"finished, {format_duration(finished[trial].seconds)}" if trial in finished else "to run"
            settings = ", ".join(f"{key} = {value}" for key, value in each.runs[trial.run].items())
            click.echo(f"{trial}: {settings}: {state}")
    first, contents = comparison.trials[0], comparison.contents
    seeded = "in the command" if comparison.seed_shift(first) is None else "every seed the script sets is shifted"
    click.echo(f"command: {' '.join(comparison.command(first))} (seed: {seeded})")
    click.echo(f"each in a copy of {contents.root}: {len(contents.copied)} files copied, {len(contents.linked)} linked")
    click.echo(f"results: {store.folder}")
    for key in [key for key in ("needs", "hours") if key in comparison.about]:
        click.echo(f"{key}: {comparison.about[key]}")


@click.command()
@click.argument("runs", nargs=-1, type=PATH, metavar="[RUN]...")
@click.option("--out", type=FILE, help=f"HTML file to write.  [default: {PAGE} in the folder of the run]")
@click.option("--text", is_flag=True, help="Print the report in the terminal instead of writing a page.")
@as_json
def report(runs: tuple[Path, ...], out: Path | None, text: bool, as_json: bool) -> None:
    """Write a report on runs, as one self-contained HTML page.

    The page shows the settings, gamma, lambda and u of every site over time, the loss, the equivariance error, and a
    verdict for each site. RUN is the folder of a run, a folder with runs (the newest is shown), or the folder of a
    comparison. Default: the newest run in .ace/runs. Several runs are shown side by side.
    """
    if text and as_json:
        raise AceError("--text and --json cannot be combined: leave one of them out")
    comparisons = [read_comparison(path) for path in runs if is_comparison(path)]
    folders = [find_run(path) for path in runs if not is_comparison(path)] if runs else [find_run(None)]
    read = [read_run(folder) for folder in dict.fromkeys(folders)]
    read += [read_run(trace, label) for found in comparisons for label, trace in found.traces().items()]
    if as_json:
        described = [describe_run(run) for run in read]
        print_json({"comparisons": [each.to_dict() for each in comparisons], "runs": described})
    if text:
        for found in comparisons:
            print_comparison(found)
        for number, run in enumerate(read):
            click.echo("\n" * bool(number or comparisons), nl=False)
            print_report(run)
    if out is not None or not (text or as_json):
        sections = [render_comparison(found) for found in comparisons]
        if out is None and len(comparisons) == 1:
            out = comparisons[0].folder / PAGE
        title = f"ACE: {comparisons[0].comparison.adapter} compared" if comparisons else ""
        out = write_report(*read, out=out, before=sections, title=title)
        click.echo(printable(f"Report: {shorten_path(out)}"), err=text or as_json)


@click.command()
@click.argument("run", required=False, type=PATH, metavar="[RUN]")
@click.option("--once", is_flag=True, help="Print the current state and exit. Without a terminal, this is the default.")
@click.option(
    "--every", type=click.FloatRange(0.05), default=SECONDS, show_default=True, help="Seconds between updates."
)
def watch(run: Path | None, once: bool, every: float) -> None:
    """Watch a run in the terminal while it trains. Stop with Ctrl-C.

    Shows gamma, lambda and u of every site, and the loss. RUN is the folder of a run, or a folder with runs (the newest
    is shown). Default: the newest run in .ace/runs.
    """
    folder = find_run(run)
    if once or not sys.stdout.isatty():
        print_report(read_run(folder))
        return
    with suppress(KeyboardInterrupt):
        watch_run(folder, seconds=every)
