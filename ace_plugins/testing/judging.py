"""Runs all checks on an adapter and collects every failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import AceError
from ..plugins.plugin import one_line
from .checks import CHECKS, Check, name_of
from .kit import CheckError, Kit, NotApplicable


@dataclass(frozen=True)
class Failure:
    """A failed check."""

    check: str
    reason: str
    look_at: str = ""
    """The hook, site and field that are the likely cause; "" if unknown."""

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}" + (f"; look at {self.look_at}" if self.look_at else "")


class AdapterCheckError(AssertionError):
    """Raised if an adapter fails at least one check.

    Attributes:
        failures: Every failure.
    """

    def __init__(self, adapter: str, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        lines = "".join(f"\n  {line}" for line in merge_failures(failures))
        super().__init__(f"adapter {adapter!r} fails {len(failures)} of {len(CHECKS)} checks:{lines}")


def merge_failures(failures: Sequence[Failure]) -> list[str]:
    """Return one line for each reason, with the names of all checks that failed for it."""
    checks: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        checks.setdefault((failure.reason, failure.look_at), []).append(failure.check)
    return [str(Failure(", ".join(names), *cause)) for cause, names in checks.items()]


@dataclass(frozen=True)
class Judgement:
    """Outcome of all checks on one adapter."""

    held: tuple[str, ...]
    """Names of the checks that passed."""
    failures: tuple[Failure, ...]
    skipped: dict[str, str]
    """Mapping from the name of each skipped check to the reason why it does not apply to this adapter."""


def judge(kit: Kit, done: Callable[[int], None] | None = None) -> Judgement:
    """Run every check on one adapter.

    Args:
        kit: The adapter's `Kit`, which the checks use.
        done: Called with 1 after each check, for progress bars.

    Returns:
        The outcome of every check. Failures are collected, not raised.
    """
    held: list[str] = []
    failures: list[Failure] = []
    skipped: dict[str, str] = {}
    for check in CHECKS:
        try:
            failure = failure_of(check, kit)
        except NotApplicable as reason:
            skipped[name_of(check)] = str(reason)
        else:
            if failure is None:
                held.append(name_of(check))
            else:
                failures.append(failure)
        if done is not None:
            done(1)
    return Judgement(tuple(held), tuple(failures), skipped)


def failure_of(check: Check, kit: Kit) -> Failure | None:
    """Run one check and return its failure, or None if it passed."""
    try:
        check(kit)
    except NotApplicable:
        raise
    except CheckError as error:
        return Failure(name_of(check), " ".join(error.reason.split()), error.look_at)
    except AceError as error:  # its message names plugin, hook and site
        return Failure(name_of(check), " ".join(str(error).split()))
    except Exception as error:
        return Failure(name_of(check), one_line(error))
    return None


def check_adapter(name: str, *, seed: int = 0, checkout: str | os.PathLike[str] | None = None) -> None:
    """Run all checks on an adapter.

    Args:
        name: Name of the adapter's entry point.
        seed: Seed of the examples.
        checkout: Folder of the upstream, for adapters of a cloned repository. Default: the folder in
            ``ACE_UPSTREAM_<ADAPTER>``, or the one found near the current folder.

    Raises:
        AdapterCheckError: At least one check failed; the error lists every failure.
        AdapterError: The adapter is unknown or not usable.
    """
    judgement = judge(Kit(name, seed, None if checkout is None else Path(checkout)))
    if judgement.failures:
        raise AdapterCheckError(name, judgement.failures)
