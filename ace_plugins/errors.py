"""What can go wrong, in one line each: the thing, what was expected, what was found, what to do."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Iterable


class AceError(Exception):
    """A mistake the user can mend. The command prints it as one line and exits with 2."""


class ConfigError(AceError, ValueError):
    """A setting that does not exist or has a value it cannot have."""

    def __init__(self, message: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        self.problems = tuple(problems)
        """Setting and what is wrong with it, where that is known, for those who know where the setting stands."""
        super().__init__(message or "; ".join(text for _, text in self.problems))


class CheckoutError(AceError):
    """A checkout that is not what the adapter patches, or cannot be changed."""

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        self.message = message
        self.details = tuple(details)
        """One line each, where there are many things to say."""
        super().__init__(f"{message}: {'; '.join(self.details)}" if self.details else message)


class AdapterError(AceError):
    """An adapter that is unknown, does not fit what is installed, or broke the contract."""


class AttachError(AceError):
    """A model that cannot be attached to, or is not attached."""


class CheckpointError(AceError, RuntimeError):
    """A checkpoint that does not belong to this model."""


class StepError(AceError, RuntimeError):
    """An optimizer step that would train the model without its dual loop."""


class AceWarning(UserWarning):
    """Something the user should know about, though work goes on."""


class AceDeprecationWarning(AceWarning, DeprecationWarning):
    """A former name that still works. Commands print it; Python hides it from users of scripts, as is usual."""


MANY = 8
"""Names that nobody wants to read where one of them is near."""


def one_of(what: str, given: object, known: Iterable[str], *, do: str = "") -> str:
    """``unknown mode 'strct': expected one of bounded, off (did you mean 'strict'?)``"""
    import difflib

    names = sorted(known)
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in difflib.get_close_matches(str(given).lower(), lower, n=1)]
    if near and len(names) > MANY:
        return f"unknown {what} {given!r}: did you mean {near[0]!r}?"
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    tail = f"; {do}" if do else ""
    expected = f"expected one of {', '.join(names)}" if names else "there is none"
    return f"unknown {what} {given!r}: {expected}{hint}{tail}"
