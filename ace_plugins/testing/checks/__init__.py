"""The checks that every adapter must pass, this project's own and third parties' alike, in the order of their telling.

A check is a function ``check_*(kit)``. It raises `CheckError`, which says what was found and where to look.
"""

from __future__ import annotations

from collections.abc import Callable

from ..kit import Kit
from .answers import (
    check_example_is_claimed,
    check_example_repeats,
    check_hooks_answer,
    check_importing_is_light,
    check_sites_are_named_for_people,
    check_sites_fit_the_forward,
)
from .attaching import (
    check_attach_leaves_the_weights,
    check_attach_moves_no_random_numbers,
    check_attach_repeats,
    check_branches_are_their_own,
    check_eval_is_upstream,
    check_eval_keeps_the_branches,
    check_gamma_zero_is_upstream,
    check_off_is_upstream,
)
from .keeping import (
    check_checkpoints_export,
    check_checkpoints_resume,
    check_copies_are_independent,
    check_project_gives_upstream_back,
)
from .symmetric import check_branches_break_the_symmetry, check_frames_leave_upstream, check_upstream_is_symmetric
from .training import check_every_branch_learns, check_every_site_learns, check_training_moves_the_duals

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
