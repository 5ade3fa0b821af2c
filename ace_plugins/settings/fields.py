"""Kinds of settings. A kind defines which values a setting accepts and how text is parsed into a value."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from ..errors import one_of

LARGEST = 1e30
"""Largest absolute value that a setting may have. It fits float32, the dtype of gamma and the duals in most models."""
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """The values that a setting accepts."""

    @property
    def expected(self) -> str:
        """Description of the accepted values, for errors."""
        raise NotImplementedError

    @property
    def metavar(self) -> str:
        """Placeholder for a value in ``--help``."""
        raise NotImplementedError

    def accepts(self, value: Any) -> bool:
        raise NotImplementedError

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value of the setting ``name``, in one line; None if it is valid."""
        return None if self.accepts(value) else f"{name} {value!r}: expected {self.expected}"

    def parse(self, text: str) -> Any:
        """Return the value that a text stands for, or raise a ValueError. `problem` tells whether it is valid."""
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    choices: tuple[str, ...]
    hint: str = ""
    """Advice that is added to the error about a word that is not accepted."""

    @property
    def metavar(self) -> str:
        return "|".join(self.choices)

    def problem(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else one_of(name, value, self.choices, do=self.hint)

    def parse(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Number(Kind):
    """A finite number that is at least ``low`` and less than ``high``."""

    low: float = -math.inf
    high: float = math.inf
    positive: bool = False
    """True if the number must be greater than 0."""
    whole: bool = False
    """True if the number must be an integer."""
    auto: bool = False
    """True if "auto" is accepted too."""

    @property
    def expected(self) -> str:
        least = "" if self.low == -math.inf else f" of at least {self.low:g}"
        below = "" if self.high == math.inf else f" and below {self.high:g}"
        what = "an integer" if self.whole else "a finite number"
        return f"{what}{' above 0' if self.positive else least}{below}{', or ' + repr('auto') if self.auto else ''}"

    @property
    def metavar(self) -> str:
        return "NUMBER|auto" if self.auto else "NUMBER"

    def accepts(self, value: Any) -> bool:
        if self.auto and value == "auto":
            return True
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value
        return -LARGEST <= number <= LARGEST and self.low <= number < self.high and (not self.positive or number > 0)

    def parse(self, text: str) -> Any:
        if self.auto and text == "auto":
            return text
        return int(text) if self.whole else float(text)


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    auto: bool = False
    """True if "auto" is accepted too."""

    @property
    def expected(self) -> str:
        return "true, false or 'auto'" if self.auto else "true or false"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool) or (self.auto and value == "auto")

    def parse(self, text: str) -> Any:
        if self.auto and text == "auto":
            return text
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]


@dataclass(frozen=True)
class Multiple(Kind):
    """A number, or a multiple such as "1x" of a quantity that is known only during training."""

    metavar = "NUMBER|1x"
    positive: bool = False
    """True if 0 is not accepted."""

    @property
    def expected(self) -> str:
        return f"a finite number {'above' if self.positive else 'of at least'} 0, or a multiple such as '1x'"

    def accepts(self, value: Any) -> bool:
        try:
            number, _ = self.split(value)
        except ValueError:
            return False
        return not isinstance(value, bool) and 0 <= number <= LARGEST and (number > 0 or not self.positive)

    def parse(self, text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            self.split(text)
            return text

    def split(self, value: Any) -> tuple[float, bool]:
        """Return the number, and True if it is a multiple: (8e-4, False) for 8e-4, (1.0, True) for "1x"."""
        text = str(value).strip().lower()
        return float(text.removesuffix("x")), text.endswith("x")


@dataclass(frozen=True)
class BudgetKind(Kind):
    """The length of a run: a number of optimizer steps, a number of epochs such as "600 epochs", or "auto"."""

    expected = "a number of optimizer steps, epochs such as '600 epochs', or 'auto'"
    metavar = "STEPS|'N epochs'|auto"

    def accepts(self, value: Any) -> bool:
        try:
            found = self.split(value)
        except ValueError:
            return False
        return not isinstance(value, bool) and all(number is None or 0 < number <= LARGEST for number in found)

    def parse(self, text: str) -> int | str:
        self.split(text)
        return int(text) if text.strip().isdecimal() else text

    def split(self, value: Any) -> tuple[int | None, int | None]:
        """Return (steps, epochs). The one that the value does not give is None; for "auto" both are None."""
        words = str(value).strip().lower().split()
        if words == ["auto"]:
            return None, None
        if len(words) == 2 and words[1] in ("epoch", "epochs"):
            return None, int(words[0])
        if len(words) == 2 and words[1] in ("step", "steps"):
            words.pop()
        return int(" ".join(words)), None
