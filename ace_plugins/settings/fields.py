"""Kinds of settings. A kind defines which values a setting accepts and how text is parsed into a value."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from ..errors import one_of

LARGEST = 1e30  # largest absolute value of a setting; it fits float32, the dtype of gamma and the duals in most models
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """The values that a setting accepts. Subclasses define `placeholder`, `describe`, `accepts` and `convert`.

    These four do not consider the word "auto", which is a value of every kind with ``auto=True``.
    """

    auto: bool = field(default=False, kw_only=True)
    placeholder = ""

    def describe(self) -> str:
        raise NotImplementedError

    def accepts(self, value: Any) -> bool:
        raise NotImplementedError

    def convert(self, text: str) -> Any:
        return text

    @property
    def expected(self) -> str:
        """Description of the accepted values, for errors."""
        return self.describe() + (", or 'auto'" if self.auto else "")

    def problem(self, name: str, value: Any) -> str | None:
        """Return the problem of a value of the setting ``name``, in one line; None if it is valid."""
        try:
            valid = (self.auto and value == "auto") or self.accepts(value)
        except ValueError:
            valid = False
        return None if valid else f"{name} {value!r}: expected {self.expected}"

    def parse(self, text: str) -> Any:
        """Return the value that a text stands for, or raise a ValueError. The value may still have a `problem`."""
        return text if self.auto and text == "auto" else self.convert(text)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words. The error about another word ends with ``hint``."""

    choices: tuple[str, ...]
    hint: str = ""

    def problem(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else one_of(name, value, self.choices, do=self.hint)


@dataclass(frozen=True)
class ChoiceOrAxis(Choice):
    """One of a few words, or the direction of an axis: x, y, z, or three numbers such as "0, 0.6, 0.8"."""

    def problem(self, name: str, value: Any) -> str | None:
        return None if parse_axis(value) else super().problem(name, value)


def parse_axis(value: Any) -> tuple[float, float, float] | None:
    """Return the direction that a text names; None if it is not the name or the three numbers of an axis."""
    if not isinstance(value, str):
        return None
    try:
        x, y, z = map(
            float, {"x": "1,0,0", "y": "0,1,0", "z": "0,0,1"}.get(value.strip(), value).strip("() ").split(",")
        )
    except ValueError:
        return None
    return (x, y, z) if 0 < math.hypot(x, y, z) < math.inf else None


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    def describe(self) -> str:
        return "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def convert(self, text: str) -> bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]


@dataclass(frozen=True)
class Number(Kind):
    """A finite number that is at least ``low`` and less than ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positive: bool = False
    whole: bool = False
    placeholder = "NUMBER"

    def describe(self) -> str:
        least = " above 0" if self.positive else "" if self.low == -math.inf else f" of at least {self.low:g}"
        below = "" if self.high == math.inf else f" and below {self.high:g}"
        return f"{'an integer' if self.whole else 'a finite number'}{least}{below}"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value
        return -LARGEST <= number <= LARGEST and self.low <= number < self.high and (not self.positive or number > 0)

    def convert(self, text: str) -> Any:
        return int(text) if self.whole else float(text)


@dataclass(frozen=True)
class Multiple(Number):
    """A number of at least 0, or a multiple such as "1x" of a quantity that is known only during training."""

    low: float = 0
    placeholder = "NUMBER|1x"

    def describe(self) -> str:
        return f"{super().describe()}, or a multiple such as '1x'"

    def accepts(self, value: Any) -> bool:
        return super().accepts(self.times(value, 1) if isinstance(value, str) else value)

    def convert(self, text: str) -> float | str:
        number = self.times(text, 1)
        return text if text.strip().lower().endswith("x") else number

    def times(self, value: Any, unit: Any) -> Any:
        """Return the value, multiplied by ``unit`` if it is a multiple such as "1x"."""
        text = str(value).strip().lower()
        return float(text.removesuffix("x")) * unit if text.endswith("x") else float(text)


@dataclass(frozen=True)
class BudgetKind(Kind):
    """The length of a run: a number of optimizer steps, or a number of epochs such as "600 epochs"."""

    auto: bool = True
    placeholder = "STEPS|'N epochs'"

    def describe(self) -> str:
        return "a number of optimizer steps, epochs such as '600 epochs'"

    def accepts(self, value: Any) -> bool:
        return not isinstance(value, bool) and all(n is None or 0 < n <= LARGEST for n in self.split(value))

    def convert(self, text: str) -> int | str:
        self.split(text)
        return int(text) if text.strip().isdecimal() else text

    def split(self, value: Any) -> tuple[int | None, int | None]:
        """Return (steps, epochs). The value gives one of them; the other is None. For "auto", both are None."""
        count, _, unit = str(value).strip().lower().partition(" ")
        if count == "auto":
            return None, None
        if unit not in ("", "step", "steps", "epoch", "epochs"):
            raise ValueError(value)
        return (None, int(count)) if unit.startswith("epoch") else (int(count), None)
