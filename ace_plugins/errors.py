"""Errors and warnings. A message is one line: what is wrong, what was expected, what was found, what to do."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would slow down every script that is patched
if TYPE_CHECKING:
    from collections.abc import Iterable


class AceError(Exception):
    """An error the user can fix. Commands print it in one line and exit with code 2."""


class ConfigError(AceError, ValueError):
    """A setting that is unknown or has an invalid value."""

    def __init__(self, message: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        self.problems = tuple(problems)
        """Pairs of a setting and its problem, so that a caller can add the setting's origin."""
        super().__init__(message or "; ".join(text for _, text in self.problems))


class CheckoutError(AceError):
    """A checkout that does not fit the adapter, or cannot be changed."""

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        self.message = message
        self.details = tuple(details)
        """Single differences, one line each."""
        super().__init__(f"{message}: {'; '.join(self.details)}" if self.details else message)


class AdapterError(AceError):
    """An adapter that is unknown, does not fit the installed versions, or violates the contract."""


class AttachError(AceError):
    """A model that ACE cannot be attached to, or is not attached to."""


class CheckpointError(AceError, RuntimeError):
    """A checkpoint that does not fit this model."""


class StepError(AceError, RuntimeError):
    """An optimizer step that would train the model without the dual loop."""


class AceWarning(UserWarning):
    """A problem that does not stop the run."""


class AceDeprecationWarning(AceWarning, DeprecationWarning):
    """A former name that still works. Commands print it; in scripts Python hides it by default."""


MANY = 8
"""If there are more names than this, `one_of` lists only the most similar one."""


def one_of(what: str, given: object, known: Iterable[str], *, do: str = "") -> str:
    """Return the message about an unknown name, with the most similar known name.

        unknown mode 'strct': expected one of bounded, off, strict (did you mean 'strict'?)

    Args:
        what: What the name stands for.
        given: The unknown name.
        known: The known names.
        do: Advice at the end.

    Returns:
        The message.
    """
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
