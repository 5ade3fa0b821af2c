"""``ace-patch compare``: one script under several settings and seeds, and what that shows."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import click

from ..compare import page as drawing
from ..compare.experiment import parse_runs, read
from ..compare.live import Lines, Screen
from ..compare.local import Local, Machine
from ..compare.metrics import parse_metric
from ..compare.plan import FOLDER, Comparison, Trial, parse_seeds, planned
from ..compare.results import Store
from ..compare.statistics import Answer
from ..compare.trial import Task
from ..errors import AceError
from ..later import later
from ..output import check_picture, say
from ..plugins.registry import registry
from ..report.tables import duration
from ..report.trace import relative
from .options import ScriptCommand, adapters_or_files, as_json, print_json

RUNS = "off,strict,resilient"


class CompareCommand(ScriptCommand):
    """ADAPTER or FILE and options first; after '--' every word is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, dashes, words = _split(args)
        rest = super().parse_args(ctx, ours)
        ctx.params["words"] = tuple(words)
        if dashes:
            self.begin_script(ctx)
        if dashes and not words and not ctx.resilient_parsing:
            raise AceError("no script given: expected ace-patch compare ADAPTER -- script.py args...")
        return rest


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    place = args.index("--")
    return args[:place], True, args[place + 1 :]


@click.command(cls=CompareCommand, options_metavar="[OPTIONS]")
@click.argument("what", metavar="ADAPTER|FILE.toml", shell_complete=adapters_or_files)
@click.option("--seeds", default=None, metavar="N|A,B,C", help="How many seeds, or which.  [default: 3]")
@click.option(
    "--runs",
    default=None,
    metavar="NAME,...",
    help=f"off, strict, bounded, resilient, scheduled, paper, fit, or name:key=value,key=value.  [default: {RUNS}]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME=REGEX",
    help="How the script prints a result: a regular expression with one group. The last match counts; "
    "the first metric is what is compared.",
)
@click.option("--higher", is_flag=True, help="Higher is better, of the metrics given here.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="How many runs at a time.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Threads of each run.")
@click.option(
    "--budget-scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="FILE: a share of its epochs."
)
@click.option("--on", "where", default="here", show_default=True, metavar="here|ray|ADDRESS", help="Where runs go.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Where results go.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Draw the curves: .png")
@click.option("--dry-run", is_flag=True, help="List the runs, and start none.")
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
    where: str,
    out: Path | None,
    picture: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Does it pay, here? Train the same script with and without ACE, with several seeds, and compare what it prints.

    \b
    ace-patch compare segnn --seeds 3 --runs off,strict -- main.py --dataset=nbody --epochs=150
    ace-patch compare experiments/nbody.toml --budget-scale 0.1

    Call it from where you would call the script. Every run has a copy of the code and links to the data, so your own
    files stay as they are. Called again, it goes on where it was stopped.
    """
    given = tuple(parse_metric(text, higher=higher) for text in metrics)
    if picture is not None:
        check_picture(picture)
    comparisons: list[tuple[str, Comparison]] = []
    if what.endswith(".toml"):
        if words:
            raise AceError(f"{what} has a command of its own: expected nothing after '--', found {words[0]!r}")
        for told in read(Path(what), budget_scale):
            chosen = parse_runs(runs) if runs else told.runs
            numbers = parse_seeds(seeds) if seeds else told.seeds
            adapter = registry().adapter(told.adapter)
            made = planned(adapter, told.words, chosen, numbers, given or told.metrics, told.about)
            comparisons.append((told.label, made))
    else:
        made = planned(registry().adapter(what), words, parse_runs(runs or RUNS), parse_seeds(seeds or "3"), given)
        comparisons.append(("", made))
    answers, failed = [], False
    for label, comparison in comparisons:
        if label:
            click.echo(label, err=as_json)
        drawn = (
            picture if picture is None or not label else picture.with_stem(f"{picture.stem}-{label.replace(' ', '-')}")
        )
        answer = _compared(
            comparison, jobs, threads, where, out if out is None or not label else out / label, drawn, dry_run
        )
        if answer is None:
            continue
        failed = failed or bool(answer.failed)
        answers.append(answer.to_dict() | ({"label": label} if label else {}))
        if not as_json:
            _tell(answer)
    if as_json and not dry_run:
        print_json(answers[0] if len(answers) == 1 else answers)
    if failed:
        sys.exit(1)


def _compared(
    comparison: Comparison,
    jobs: int | None,
    threads: int | None,
    where: str,
    out: Path | None,
    picture: Path | None,
    dry_run: bool,
) -> Answer | None:
    """One comparison from its start, or from where it was stopped, to its answer; None if it is only listed."""
    machine = Machine.here()
    at_once = min(machine.jobs(jobs), len(comparison.trials))
    store = Store((out or FOLDER / f"{comparison.adapter}-{comparison.fingerprint()}").absolute(), comparison)
    if dry_run:
        _list(comparison, store, machine, at_once)
        return None
    finished = store.finished()
    missing = [trial for trial in comparison.trials if trial not in finished]
    store.folder.mkdir(parents=True, exist_ok=True)
    comparison.contents.check_space(store.folder, len(missing))
    kept = store.describe(threads or max(1, machine.processors // at_once))
    tasks = {trial: Task.of(comparison, trial, threads or int(kept["threads"])) for trial in missing}
    if finished:
        told = f"{len(finished)} of {len(comparison.trials)} runs were finished before, in {relative(store.folder)}"
        say(told, anyway=True)
    before = comparison.contents.state_of_data()
    progress = (Screen if sys.stderr.isatty() else Lines)(comparison, finished, at_once)
    _carry_out(store, tasks, progress, machine, where)
    if comparison.contents.state_of_data() != before:
        say(f"a run wrote to data in {comparison.contents.root}, which all runs share: look at it", anyway=True)
    results = list(progress.done.values())
    drawn = picture if picture is not None and drawing.draw(comparison, results, picture) else None
    failed = {str(trial): text for trial, text in progress.failed.items()}
    return Answer(comparison, results, failed, folder=store.folder, picture=drawn)


def _carry_out(store: Store, tasks: dict[Trial, Task], progress: Lines | Screen, machine: Machine, where: str) -> None:
    backend: Any = Local(progress.jobs, machine.devices)
    if where != "here":
        backend = later("ace_plugins.compare.cluster").Cluster(where, progress.jobs)
    events = backend.carry_out(store, tasks)
    try:
        # What a cluster sends is as good as Ctrl-C. Ray tells its news on stdout, which is for the answer.
        with _interrupted_by(signal.SIGTERM), progress, redirect_stdout(sys.stderr):
            for event in events:
                progress.hear(event)
    except KeyboardInterrupt:
        events.close()
        done = len(store.finished())
        say(f"stopped; {done} of {len(store.comparison.trials)} runs are finished: call it again to go on", anyway=True)
        sys.exit(130)


@contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """A signal is a KeyboardInterrupt, for the length of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _list(comparison: Comparison, store: Store, machine: Machine, jobs: int) -> None:
    finished = store.finished()
    for trial in comparison.trials:
        done = finished.get(trial)
        state = f"finished, {duration(done.seconds)}" if done else "to run"
        settings = ", ".join(f"{key} = {value}" for key, value in comparison.runs[trial.run].items())
        click.echo(f"{trial}: {settings}: {state}")
    shift = comparison.shift(comparison.trials[0]) is not None
    seeded = "every seed the script sets is shifted" if shift else "in the command"
    click.echo(f"command: {' '.join(comparison.command(comparison.trials[0]))} (seed: {seeded})")
    copied, linked = len(comparison.contents.copied), len(comparison.contents.linked)
    click.echo(f"each in a copy of {comparison.contents.root}: {copied} files copied, {linked} linked")
    click.echo(
        f"{jobs} at a time, on {machine.processors} processors and {len(machine.devices)} GPUs; in {store.folder}"
    )
    if finished:
        each = sum(result.seconds for result in finished.values()) / len(finished)
        open_ = len(comparison.trials) - len(finished)
        click.echo(f"about {duration(open_ * each / jobs)} to go, by those that are finished")
    for key in ("needs", "hours"):
        if key in comparison.about:
            click.echo(f"{key}: {comparison.about[key]}")


def _tell(answer: Answer) -> None:
    from rich.console import Console

    console = Console()
    if answer.rows:
        console.print(answer.table())
    for sentence in answer.sentences():
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for text in answer.failed.values():
        click.echo(f"ace: {text}", err=True)
    drawn = f"; picture: {answer.picture}" if answer.picture else ""
    click.echo(f"Results: {relative(answer.folder)}{drawn}")
