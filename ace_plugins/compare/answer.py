"""The answer to "does it pay, here?": a table, sentences, and the same for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Comparison
from .results import Result
from .statistics import Difference, Row, differences, rows

if TYPE_CHECKING:
    from rich.table import Table


class Answer:
    """What the results so far say."""

    def __init__(
        self,
        comparison: Comparison,
        results: Sequence[Result],
        failed: Mapping[str, str] | None = None,
        *,
        folder: Path = Path(),
        picture: Path | None = None,
    ) -> None:
        self.folder = folder
        """Where the results are."""
        self.picture = picture
        self.comparison = comparison
        self.results = list(results)
        self.failed = dict(failed or {})
        runs = list(comparison.runs)
        self.rows: list[Row] = rows(results, runs, comparison.metrics)
        self.differences: list[Difference] = differences(self.rows, runs, comparison.metrics[0])

    def sentences(self) -> list[str]:
        told = [difference.sentence() + "." for difference in self.differences]
        if self.failed:
            told.append(f"{len(self.failed)} of {len(self.comparison.trials)} runs failed and are not in the table.")
        return told

    def table(self) -> Table:
        from rich import box
        from rich.table import Table

        first, *others = self.comparison.metrics
        made = Table(box=box.SIMPLE_HEAD, caption_justify="left")
        better = "higher" if first.higher else "lower"
        made.caption = f"{first.name}: mean and standard deviation over seeds, {better} is better."
        made.add_column("run", no_wrap=True)
        made.add_column("seeds", justify="right")
        made.add_column(first.name, justify="right")
        for metric in others:
            made.add_column(metric.name, justify="right")
        made.add_column("change", justify="right")
        timed = any(row.seconds for row in self.rows)
        measured = any(row.error is not None for row in self.rows)
        if timed:
            made.add_column("time", justify="right")
        if measured:
            made.add_column("equiv.\nerror", justify="right")
        paper = self.comparison.about.get("paper", {})
        if paper:
            made.add_column("paper", justify="right")
        changes = {difference.run: difference for difference in self.differences}
        for row in self.rows:
            spread = "" if row.spread is None else f" ± {row.spread:.2g}"
            cells = [row.run, str(len(row.values)), f"{row.mean:.4g}{spread}"]
            cells += [f"{row.others[metric.name]:.4g}" for metric in others]
            cells.append(change_in_words(changes[row.run]) if row.run in changes else "")
            if timed:
                cells.append("" if row.seconds is None else f"x {row.seconds:.2f}")
            if measured:
                cells.append("" if row.error is None else f"{row.error:.2g}")
            if paper:
                cells.append(str(paper.get(row.run, "")))
            made.add_row(*cells)
        return made

    def to_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "metrics": [{"name": m.name, "higher": m.higher} for m in self.comparison.metrics],
            "runs": [
                {
                    "run": row.run,
                    "settings": dict(self.comparison.runs[row.run]),
                    "values": {str(seed): value for seed, value in row.values.items()},
                    "mean": row.mean,
                    "spread": row.spread,
                    "others": row.others,
                    "time": row.seconds,
                    "equivariance_error": row.error,
                }
                for row in self.rows
            ],
            "differences": [
                {
                    "run": each.run,
                    "to": each.base,
                    "changes": list(each.changes),
                    "mean": each.mean,
                    "low": each.low,
                    "high": each.high,
                    "better": each.better,
                }
                for each in self.differences
            ],
            "sentences": self.sentences(),
            "failed": self.failed,
            "folder": str(self.folder),
            "picture": None if self.picture is None else str(self.picture),
        }


def change_in_words(difference: Difference) -> str:
    mean = difference.of_metric(difference.mean)
    return f"{100 * mean:+.1f} %" if difference.proportional else f"{mean:+.3g}"
