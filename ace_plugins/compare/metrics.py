"""What a script prints of its results, read while it is printed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from ..contract.upstreams import Metric
from ..errors import AceError

_EPOCH = re.compile(r"epoch\D{0,3}(\d+)", re.IGNORECASE)
KEPT = 20
"""Lines of the end of a log that people get to see."""


def parse_metric(text: str, *, higher: bool = False) -> Metric:
    """``test=Test MAE: ([0-9.e-]+)``, or a pattern without a name."""
    name, equals, pattern = text.partition("=")
    if not equals or not re.fullmatch(r"[\w -]+", name):
        name, pattern = "metric", text
    made = Metric(name, pattern, higher=higher)
    compiled(made.pattern, name)
    return made


def compiled(pattern: str, name: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise AceError(f"metric {name!r}: {pattern!r} is no regular expression, {error}; mend it") from None
    if found.groups != 1:
        raise AceError(
            f"metric {name!r}: expected one group for the number, as in 'Test MAE: ([0-9.e-]+)', "
            f"found {found.groups} in {pattern!r}"
        )
    return found


class Reading:
    """The metrics of one run, as far as its script has printed them."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.values: dict[str, float] = {}
        """The last match of every metric that was met."""
        self.curves: dict[str, list[tuple[float, float]]] = {metric.name: [] for metric in metrics}
        """(seconds, value) of every evaluation."""
        self.epoch = 0
        """The last that the script has named, to tell how far it is."""
        self.seconds = 0.0
        """When the last line was printed."""
        self.end: deque[str] = deque(maxlen=KEPT)
        self._patterns = [
            (metric.name, compiled(metric.pattern, metric.name), compiled(metric.curve or metric.pattern, metric.name))
            for metric in metrics
        ]

    def feed(self, line: str, seconds: float) -> None:
        """One more line, printed after so many seconds."""
        self.seconds = seconds
        if line.strip():
            self.end.append(line.rstrip())
        named = _EPOCH.search(line)
        if named:
            self.epoch = int(named[1])
        for name, result, point in self._patterns:
            for found in result.finditer(line):
                self.values[name] = _number(found[1], name, line)
            for found in point.finditer(line):
                self.curves[name].append((round(seconds, 3), _number(found[1], name, line)))

    def missing(self) -> str:
        """What to say of a script that printed none of its metrics; empty if it did."""
        absent = [metric for metric in self.metrics if metric.name not in self.values]
        if not absent:
            return ""
        last = f"; the last line it printed is {self.end[-1]!r}" if self.end else "; it printed nothing"
        return f"it printed no {absent[0].name!r} ({absent[0].pattern!r}){last}"


def _number(text: str, name: str, line: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise AceError(f"metric {name!r}: expected a number, found {text!r} in {line.strip()!r}") from None
