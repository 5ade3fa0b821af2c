"""Errors and warnings. A message is one line that says what is wrong, what was expected and found, and what to do."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would slow down every script that is patched
if TYPE_CHECKING:
    from collections.abc import Iterable


class AceError(Exception):
    """Base class of errors that the user can fix. Commands print the message in one line and exit with code 2."""


class ConfigError(AceError, ValueError):
    """Raised for a setting that is unknown or has an invalid value."""

    def __init__(self, message: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        self.problems = tuple(problems)
        """Pairs of a setting's name and its problem, so that a caller can add the origin of the setting."""
        super().__init__(message or "; ".join(text for _, text in self.problems))


class CheckoutError(AceError):
    """Raised for a checkout that does not fit the adapter or cannot be changed."""

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        self.message = message
        self.details = tuple(details)
        """Differences between the checkout and what the adapter expects, one line each."""
        super().__init__(f"{message}: {'; '.join(self.details)}" if self.details else message)


class AdapterError(AceError):
    """Raised for an adapter that is unknown, does not fit the installed versions, or violates the contract."""


class AttachError(AceError):
    """Raised if ACE cannot be attached to a model, or if ACE is needed but not attached."""


class CheckpointError(AceError, RuntimeError):
    """Raised for a checkpoint that does not fit the model."""


class StepError(AceError, RuntimeError):
    """Raised by an optimizer step that would train the model without the dual loop."""


class AceWarning(UserWarning):
    """Warning about a problem that does not stop the run."""


class AceDeprecationWarning(AceWarning, DeprecationWarning):
    """Warning about a former name that still works. Commands print it; in scripts Python hides it by default."""


def one_of(what: str, given: object, known: Iterable[str], *, do: str = "") -> str:
    """Return the error message for an unknown name, with the most similar known name.

        unknown mode 'strct': expected one of bounded, off, strict (did you mean 'strict'?)

    Args:
        what: Kind of the name, such as "mode".
        given: The unknown name.
        known: The known names.
        do: Advice for the end of the message.

    Returns:
        The message.
    """
    import difflib

    names = sorted(known)
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in difflib.get_close_matches(str(given).lower(), lower, n=1)]
    if near and len(names) > 8:  # too many names to list
        return f"unknown {what} {given!r}: did you mean {near[0]!r}?"
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    tail = f"; {do}" if do else ""
    expected = f"expected one of {', '.join(names)}" if names else "there is none"
    return f"unknown {what} {given!r}: {expected}{hint}{tail}"
