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

    expected = "text"
    """In errors: what to write."""
    metavar = "TEXT"
    """In ``--help``."""

    def holds(self, value: Any) -> bool:
        """Whether a setting of this kind can have that value."""
        raise NotImplementedError

    def problem(self, name: str, value: Any) -> str | None:
        """What is wrong with the value of the setting of that name, in one line; None if it is fine."""
        return None if self.holds(value) else f"{name} {value!r}: expected {self.expected}"

    def parse(self, text: str) -> Any:
        """The value that a text stands for. It may still have a problem. Raises ValueError if it stands for none."""
        return text


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    choices: tuple[str, ...]
    hint: str = ""
    """Added to the error about any other word."""

    def problem(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else one_of(name, value, self.choices, do=self.hint)


@dataclass(frozen=True)
class Number(Kind):
    """A finite number of at least ``low``, below ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positive: bool = False
    """Above 0."""
    whole: bool = False
    """An integer."""
    metavar = "NUMBER"

    @property
    def expected(self) -> str:  # type: ignore[override]
        least = "" if self.low == -math.inf else f" of at least {self.low:g}"
        below = "" if self.high == math.inf else f" and below {self.high:g}"
        what = "an integer" if self.whole else "a finite number"
        return f"{what}{' above 0' if self.positive else least}{below}"

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value
        return -LARGEST <= number <= LARGEST and self.low <= number < self.high and (not self.positive or number > 0)

    def parse(self, text: str) -> float | int:
        return int(text) if self.whole else float(text)


class Flag(Kind):
    """Yes or no."""

    expected = "true or false"

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)

    def parse(self, text: str) -> bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]


class Perhaps(Flag):
    """Yes, no, or "auto"."""

    expected = "true, false or 'auto'"

    def holds(self, value: Any) -> bool:
        return value == "auto" or super().holds(value)

    def parse(self, text: str) -> Any:
        return text if text == "auto" else super().parse(text)


class Rate(Kind):
    """A learning rate: a number, or a multiple of the live one, as "1x"."""

    expected = "a finite number of at least 0, or a multiple such as '1x'"
    metavar = "NUMBER|1x"

    def holds(self, value: Any) -> bool:
        try:
            return not isinstance(value, bool) and 0 <= self.split(value)[0] <= LARGEST
        except ValueError:
            return False

    def parse(self, text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            self.split(text)
            return text

    def split(self, value: Any) -> tuple[float, bool]:
        """(number, is it a multiple of the run's own scale): 8e-4 is absolute, "1x" a multiple."""
        text = str(value).strip().lower()
        return float(text.removesuffix("x")), text.endswith("x")


class Price(Rate):
    """A price of slack: a number, or a multiple of the loss's own gradient, as "1x"."""

    expected = "a finite number above 0, or a multiple such as '1x'"

    def holds(self, value: Any) -> bool:
        return super().holds(value) and self.split(value)[0] > 0


class NumberOrAuto(Number):
    """A number, or "auto"."""

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"{super().expected}, or 'auto'"

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return "NUMBER|auto"

    def holds(self, value: Any) -> bool:
        return value == "auto" or super().holds(value)

    def parse(self, text: str) -> Any:
        return text if text == "auto" else super().parse(text)


class Budget(Kind):
    """How long a run is: optimizer steps, epochs as "600 epochs", or "auto"."""

    expected = "a number of optimizer steps, epochs such as '600 epochs', or 'auto'"
    metavar = "STEPS|'N epochs'|auto"

    def holds(self, value: Any) -> bool:
        try:
            steps, epochs = self.split(value)
        except ValueError:
            return False
        return not isinstance(value, bool) and all(
            number is None or 0 < number <= LARGEST for number in (steps, epochs)
        )

    def parse(self, text: str) -> int | str:
        self.split(text)
        return int(text) if text.strip().isdecimal() else text

    def split(self, value: Any) -> tuple[int | None, int | None]:
        """(steps, epochs), each None where the value does not say it."""
        words = str(value).strip().lower().split()
        if words == ["auto"]:
            return None, None
        if len(words) == 2 and words[1] in ("epoch", "epochs"):
            return None, int(words[0])
        if len(words) == 2 and words[1] in ("step", "steps"):
            words.pop()
        return int(" ".join(words)), None
