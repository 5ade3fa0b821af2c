"""Commands about runs: ``report`` for finished runs, ``watch`` for a run that is still training."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..compare.page import is_comparison, print_comparison, read_comparison, render_comparison
from ..errors import AceError
from ..report.page import PAGE, describe_run, write_report
from ..report.runs import find_run, read_run
from ..report.terminal import SECONDS, print_report, watch_run
from ..report.trace import shorten_path
from .options import as_json, print_json

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("--out", type=FILE, help=f"The page to write.  [default: {PAGE} in the folder of the run]")
@click.option("--text", is_flag=True, help="Print the report in the terminal instead.")
@as_json
def report(runs: tuple[Path, ...], out: Path | None, text: bool, as_json: bool) -> None:
    """Write a report on runs, as one self-contained HTML page.

    It shows the settings, gamma, lambda and u of every site over time, the loss, the equivariance error, and a verdict
    for each site. RUN is the folder of a run, a folder with runs (the newest is used), or the results of 'ace-patch
    compare'. Default: the newest run in .ace/runs. Several runs are shown side by side.
    """
    if text and as_json:
        raise AceError("--text and --json: expected one of them")
    comparisons = [read_comparison(path) for path in runs if is_comparison(path)]
    folders = [find_run(path) for path in runs if not is_comparison(path)] if runs else [find_run(None)]
    read = [read_run(folder) for folder in dict.fromkeys(folders)]
    read += [read_run(trace, label) for found in comparisons for label, trace in found.traces().items()]
    if as_json:
        compared = [found.to_dict() for found in comparisons]
        print_json({"comparisons": compared, "runs": [describe_run(run) for run in read]})
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
        click.echo(f"Report: {shorten_path(out)}", err=text or as_json)


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@click.option("--once", is_flag=True, help="Print the current state and exit, as without a terminal.")
@click.option(
    "--every", type=click.FloatRange(min=0.05), default=SECONDS, show_default=True, help="Seconds between updates."
)
def watch(run: Path | None, once: bool, every: float) -> None:
    """Watch a run in the terminal while it trains. Stop with Ctrl-C.

    Shows gamma, lambda and u of every site, and the loss. RUN is the folder of a run, or a folder with runs, of which
    the newest is shown. Default: the newest run in .ace/runs.
    """
    folder = find_run(run)
    if once or not sys.stdout.isatty():
        print_report(read_run(folder))
        return
    try:
        watch_run(folder, seconds=every)
    except KeyboardInterrupt:
        sys.exit(0)
