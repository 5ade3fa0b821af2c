"""The kinds of settings: which values one can have, and how it is read from text."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from ..errors import one_of

LARGEST = 1e30
"""Past this a number is as good as infinite: gamma and the duals are float32 in most models."""
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Kind:
    """What a setting can be."""

    text = "text"
    """In errors: what to write."""
    metavar = "TEXT"
    """In ``--help``."""

    def problem(self, name: str, value: Any) -> str | None:
        """What is wrong with the value of the setting of that name, in one line; None if it is fine."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """The value that a text stands for. It may still have a problem. Raises ValueError if it stands for none."""
        return text


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    choices: tuple[str, ...]

    def problem(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else one_of(name, value, self.choices)


@dataclass(frozen=True)
class Number(Kind):
    """A finite number of at least ``low``, below ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positive: bool = False
    """Above 0."""
    text = "a number"
    metavar = "NUMBER"

    def problem(self, name: str, value: Any) -> str | None:
        if not isinstance(value, bool) and isinstance(value, numbers.Real) and self._holds(value):
            return None
        least = "" if self.low == -math.inf else f" of at least {self.low:g}"
        below = "" if self.high == math.inf else f" and below {self.high:g}"
        return f"{name} {value!r}: expected a finite number{' above 0' if self.positive else least}{below}"

    def _holds(self, value: Any) -> bool:
        return -LARGEST <= value <= LARGEST and self.low <= value < self.high and not (self.positive and value <= 0)

    def parse(self, text: str) -> float:
        return float(text)


@dataclass(frozen=True)
class Whole(Kind):
    """An integer of at least ``least``."""

    least: int = 0
    text = "an integer"
    metavar = "INTEGER"

    def problem(self, name: str, value: Any) -> str | None:
        if not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= self.least:
            return None
        return f"{name} {value!r}: expected an integer of at least {self.least}"

    def parse(self, text: str) -> int:
        return int(text)


class Flag(Kind):
    """Yes or no."""

    text = "1 or 0"

    def problem(self, name: str, value: Any) -> str | None:
        return None if isinstance(value, bool) else f"{name} {value!r}: expected true or false"

    def parse(self, text: str) -> bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]


class Rate(Kind):
    """A learning rate: a number, or a multiple of the live one, as "1x"."""

    metavar = "NUMBER|1x"

    def problem(self, name: str, value: Any) -> str | None:
        try:
            rate, _ = self.split(value)
        except ValueError:
            return f"{name} {value!r}: expected a number, or a multiple such as '1x'"
        if 0 <= rate <= LARGEST:
            return None
        return f"{name} {value!r}: expected a finite number of at least 0, or a multiple such as '1x'"

    def parse(self, text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    def split(self, value: Any) -> tuple[float, bool]:
        """(number, is it a multiple of the live primal rate): 8e-4 is absolute, "1x" a multiple."""
        if isinstance(value, bool):
            raise ValueError(value)
        text = str(value).strip().lower()
        return float(text.removesuffix("x")), text.endswith("x")
