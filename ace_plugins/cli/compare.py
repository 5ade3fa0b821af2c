"""``ace-patch compare``: train a script with several settings and seeds, and compare the results."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..compare.experiment import Experiment, parse_metric, parse_runs, parse_seeds, read_experiments
from ..compare.page import ComparisonResult, print_comparison
from ..compare.plan import Comparison, Store, plan_comparison
from ..compare.results import RUNS, execute
from ..compare.trial import choose_jobs, count_processors, list_devices
from ..errors import AceError
from ..report.tables import format_duration
from ..report.trace import shorten_path
from .options import ScriptCommand, adapters_or_files, as_json, print_json


class CompareCommand(ScriptCommand):
    """A command with ADAPTER or FILE and options before '--', and a script with its arguments after '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        script = args[args.index("--") + 1 :] if "--" in args else []
        rest = super().parse_args(ctx, args)
        words = ctx.params["words"]
        if list(words) != script and not ctx.resilient_parsing:
            raise AceError(f"{words[0]!r}: expected '--' before the script, as in ace-patch compare schnet -- train.py")
        return rest


@click.command(cls=CompareCommand)
@click.argument("what", metavar="ADAPTER|FILE.toml", shell_complete=adapters_or_files)
@click.argument("words", nargs=-1, type=click.Path(), metavar="[-- SCRIPT [ARGS]...]")
@click.option("--seeds", default=None, metavar="N|A,B,C", help="Number of seeds, or the seeds.  [default: 3]")
@click.option(
    "--runs",
    default=None,
    metavar="NAME,...",
    help=f"Modes (off, auto, strict, ...), presets (paper, fit), or name:key=value,key=value.  [default: {RUNS}]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=REGEX",
    help="Pattern of a printed result: a regular expression with {number} or one group. The last match counts; "
    "the first metric is compared.",
)
@click.option("--higher", is_flag=True, help="Higher is better, for the metrics given with --metric.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Number of simultaneous runs.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Threads per run.")
@click.option(
    "--budget-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    help="Factor for the epochs in FILE.toml.",
)
@click.option("--on", default="here", show_default=True, metavar="here|ray|ADDRESS", help="Where to run.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder for the results.")
@click.option("--dry-run", is_flag=True, help="List the runs without starting any.")
@as_json
def compare(
    what: str,
    words: tuple[str, ...],
    seeds: str | None,
    runs: str | None,
    metrics: tuple[str, ...],
    higher: bool,
    jobs: int | None,
    threads: int | None,
    budget_scale: float,
    on: str,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compare a script with and without ACE over several seeds.

    The script's printed results are compared.

    \b
    ace-patch compare segnn --seeds 3 --runs off,auto -- main.py --dataset=nbody --epochs=150
    ace-patch compare experiments/nbody.toml --budget-scale 0.1

    Call it from the folder where you would call the script. Each run gets a copy of the code and links to the data, so
    your files stay unchanged. Called again, it continues where it stopped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given: dict[str, Any] = {}
    if runs:
        given["runs"] = parse_runs(runs)
    if seeds:
        given["seeds"] = parse_seeds(seeds)
    if metrics:
        given["metrics"] = tuple(parse_metric(text, higher=higher) for text in metrics)
    if what.endswith(".toml"):
        if words:
            raise AceError(f"{what} contains the command: expected nothing after '--', found {words[0]!r}")
        experiments = read_experiments(Path(what), budget_scale)
    else:
        experiments = [Experiment(what, words, parse_runs(RUNS))]
    results = []
    # All comparisons are checked before the first one starts.
    for comparison in [plan_comparison(replace(experiment, **given)) for experiment in experiments]:
        label = comparison.label
        if label:
            click.echo(label, err=as_json)
        folder = out / label if out and label else out
        if dry_run:
            _list(comparison, folder, jobs)
            continue
        try:
            result = execute(comparison, jobs=jobs, threads=threads, on=on, out=folder)
        except KeyboardInterrupt:
            sys.exit(130)
        results.append(result)
        if not as_json:
            _print(result)
    if as_json and not dry_run:
        printed = [result.to_dict() for result in results]
        print_json(printed[0] if len(printed) == 1 else printed)
    if any(result.failed for result in results):
        sys.exit(1)


def _list(comparison: Comparison, out: Path | None, jobs: int | None) -> None:
    store, jobs = Store(comparison, out), choose_jobs(jobs, len(comparison.trials))
    finished = store.load()
    for trial in comparison.trials:
        state = f"finished, {format_duration(finished[trial].seconds)}" if trial in finished else "to run"
        settings = ", ".join(f"{key} = {value}" for key, value in comparison.runs[trial.run].items())
        click.echo(f"{trial}: {settings}: {state}")
    first, contents = comparison.trials[0], comparison.contents
    seeded = "in the command" if comparison.seed_shift(first) is None else "every seed the script sets is shifted"
    click.echo(f"command: {' '.join(comparison.command(first))} (seed: {seeded})")
    files = f"{len(contents.copied)} files copied, {len(contents.linked)} linked"
    click.echo(f"each in a copy of {contents.root}: {files}")
    click.echo(f"{jobs} at a time, on {count_processors()} processors and {len(list_devices())} GPUs")
    click.echo(f"results: {store.folder}")
    for key in ("needs", "hours"):
        if key in comparison.about:
            click.echo(f"{key}: {comparison.about[key]}")


def _print(result: ComparisonResult) -> None:
    print_comparison(result)
    for trial, text in result.failed.items():
        click.echo(f"ace: {trial}: {text}", err=True)
    click.echo(f"Results: {shorten_path(result.folder)}")
