"""The contract, on one page. An adapter implements the first group; an observer only the last.

Mark implementations with ``ace_plugins.hookimpl`` and name the module in the entry point group ``ace_plugins``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click
    from torch import nn

    from ..settings.config import Config
    from ..symmetry.actions import GroupAction
    from .sites import Node
    from .upstreams import AnyShim, Example, Script, Upstream

hookspec = pluggy.HookspecMarker("ace_plugins")
hookimpl = pluggy.HookimplMarker("ace_plugins")


@hookspec
def ace_upstream() -> Upstream:  # type: ignore[empty-body]
    """What this adapter patches. Having this hook is what makes a plugin an adapter."""


@hookspec
def ace_layers(model: nn.Module) -> Sequence[Node]:  # type: ignore[empty-body]
    """The sites of this model, and the stems their branches share, in the order of the forward."""


@hookspec
def ace_branch(site: Node, model: nn.Module, config: Config) -> nn.Module | None:
    """The non-equivariant module for a site or stem of this model, on CPU; None for the host's default."""


@hookspec
def ace_group_action(model: nn.Module) -> GroupAction:  # type: ignore[empty-body]
    """The group, and how an element acts on the model's inputs and outputs."""


@hookspec
def ace_preset() -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
    """Named settings. "paper" is what the literature used; "fit" is what this adapter adds to the host's default."""


@hookspec
def ace_shims() -> Sequence[AnyShim]:  # type: ignore[empty-body]
    """Repairs that let this upstream run on today's stack, each applied only where the thing is missing."""


@hookspec
def ace_script(argv: Sequence[str]) -> Script | None:
    """What the command line of one of upstream's own scripts says; None if this is none of them."""


@hookspec
def ace_example(seed: int, model: nn.Module | None) -> Example:  # type: ignore[empty-body]
    """A small model and batch made without data, for doctor, the test kit and the docs; or a batch for ``model``."""


@hookspec
def ace_demo() -> click.Command:  # type: ignore[empty-body]
    """A command that shows this adapter at work, in minutes: ``ace-patch demo`` runs it without options."""


@hookspec
def ace_datasets() -> Mapping[str, click.Command]:  # type: ignore[empty-body]
    """Commands that make data sets this upstream reads: ``ace-patch data NAME``."""


@hookspec
def ace_attached(model: nn.Module) -> None:
    """Observer: a model was attached."""


@hookspec
def ace_stepped(model: nn.Module, step: int) -> None:
    """Observer: the dual loop made step number ``step`` (1, 2, ...) of this model."""


@hookspec
def ace_finished(model: nn.Module) -> None:
    """Observer: the run of this model ended (the process ends, or the model was projected)."""
