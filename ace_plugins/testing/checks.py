"""The checks that every adapter must pass, this project's own and third parties' alike, in the order of their telling.

A check is a function ``check_*(kit)``. It raises `CheckError`, which says what was found and where to look.

All checks on one adapter: every failure is told, not the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import AceError
from ..plugins.plugin import one_line
from .contract_checks import (
    check_example_is_claimed,
    check_example_repeats,
    check_hooks_answer,
    check_importing_is_light,
    check_sites_are_named_for_people,
    check_sites_fit_the_forward,
)
from .kit import CheckError, Kit, NotApplicable
from .model_checks import (
    check_attach_leaves_the_weights,
    check_attach_moves_no_random_numbers,
    check_attach_repeats,
    check_branches_are_their_own,
    check_branches_break_the_symmetry,
    check_checkpoints_export,
    check_checkpoints_resume,
    check_copies_are_independent,
    check_eval_is_upstream,
    check_eval_keeps_the_branches,
    check_every_branch_learns,
    check_every_site_learns,
    check_frames_leave_upstream,
    check_gamma_zero_is_upstream,
    check_off_is_upstream,
    check_project_gives_upstream_back,
    check_training_moves_the_duals,
    check_upstream_is_symmetric,
)

Check = Callable[[Kit], None]

CHECKS: tuple[Check, ...] = (
    check_importing_is_light,
    check_hooks_answer,
    check_example_is_claimed,
    check_example_repeats,
    check_sites_are_named_for_people,
    check_sites_fit_the_forward,
    check_attach_moves_no_random_numbers,
    check_attach_leaves_the_weights,
    check_attach_repeats,
    check_branches_are_their_own,
    check_gamma_zero_is_upstream,
    check_eval_is_upstream,
    check_eval_keeps_the_branches,
    check_off_is_upstream,
    check_every_site_learns,
    check_every_branch_learns,
    check_training_moves_the_duals,
    check_project_gives_upstream_back,
    check_copies_are_independent,
    check_checkpoints_resume,
    check_checkpoints_export,
    check_upstream_is_symmetric,
    check_frames_leave_upstream,
    check_branches_break_the_symmetry,
)


def name_of(check: Check) -> str:
    """What people call it: "gamma_zero_is_upstream"."""
    return check.__name__.removeprefix("check_")


@dataclass(frozen=True)
class Failure:
    """A check that did not hold, why, and where to look."""

    check: str
    reason: str
    look_at: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}" + (f"; look at {self.look_at}" if self.look_at else "")


class AdapterCheckError(AssertionError):
    """An adapter breaks the contract; ``failures`` says where."""

    def __init__(self, adapter: str, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        lines = "".join(f"\n  {line}" for line in together(failures))
        super().__init__(f"adapter {adapter!r} fails {len(failures)} of {len(CHECKS)} checks:{lines}")


def together(failures: Sequence[Failure]) -> list[str]:
    """A line for each reason, with the checks that it fails: one cause often fails many."""
    checks: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        checks.setdefault((failure.reason, failure.look_at), []).append(failure.check)
    return [str(Failure(", ".join(names), *cause)) for cause, names in checks.items()]


@dataclass(frozen=True)
class Judgement:
    """What the checks found."""

    held: tuple[str, ...]
    failures: tuple[Failure, ...]
    skipped: dict[str, str]
    """Check -> why it has nothing to judge."""


def judge(kit: Kit, done: Callable[[int], None] | None = None) -> Judgement:
    """Every check on this adapter. ``done`` is called with 1 after each."""
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
    """Why this check fails; None if it holds."""
    try:
        check(kit)
    except NotApplicable:
        raise
    except CheckError as error:
        return Failure(name_of(check), " ".join(error.reason.split()), error.look_at)
    except AceError as error:  # it names plugin, hook and site itself
        return Failure(name_of(check), " ".join(str(error).split()))
    except Exception as error:
        return Failure(name_of(check), one_line(error))
    return None


def check_adapter(name: str, *, seed: int = 0, checkout: str | os.PathLike[str] | None = None) -> None:
    """Run all checks on an adapter by its entry point name; raise with every failure there is.

    ``checkout`` is where its upstream is, if that is one people clone (or ``ACE_UPSTREAM_<NAME>`` says it).
    """
    judgement = judge(Kit(name, seed, None if checkout is None else Path(checkout)))
    if judgement.failures:
        raise AdapterCheckError(name, judgement.failures)
