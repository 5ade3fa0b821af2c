"""All hooks that a plugin can implement. Adapters implement the first ten, observers the last three.

Mark implementations with `hookimpl`, and list their module under the entry point group ``ace_plugins``:

    @hookimpl
    def ace_upstream() -> Upstream:
        return Upstream("MyNet", models=("mynet.model:MyNet",))

An implementation may leave out parameters it does not use. Hook wrappers are refused. Observers run in pluggy's order:
the last registered first, unless marked ``tryfirst`` or ``trylast``. If an observer raises an error, training continues
with a warning.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from .upstreams import is_object_path

if TYPE_CHECKING:
    import click
    from torch import nn

    from ..settings.config import Config
    from ..symmetry.actions import GroupAction
    from .sites import Node
    from .upstreams import AnyShim, Example, Script, Upstream

hookspec = pluggy.HookspecMarker("ace_plugins")
hookimpl = pluggy.HookimplMarker("ace_plugins")


class LazyHook:
    """An adapter hook that is implemented in another module. That module is imported when the hook is called.

    Every command imports every adapter, so adapters must not import torch or their upstream when they are loaded.
    The target, "module:name", is a function with the hook's parameters, or the hook's result itself:

        ace_example = LazyHook("ace_mynet.example:small_example")
        ace_shims = LazyHook("ace_mynet.shims:SHIMS")
    """

    def __init__(self, target: str) -> None:
        if not is_object_path(target):
            raise ValueError(f"LazyHook: expected 'module:name', such as 'ace_mynet.example:example', found {target!r}")
        self.target = target

    def load(self) -> Any:
        """Import and return the target."""
        return pkgutil.resolve_name(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.load()
        return found(*args, **kwargs) if inspect.isroutine(found) else found


class Hooks:
    """The hook specifications."""

    @hookspec
    def ace_upstream(self) -> Upstream:  # type: ignore[empty-body]
        """Return the upstream that this adapter patches. A plugin with this hook is an adapter."""

    @hookspec
    def ace_layers(self, model: nn.Module) -> Sequence[Node]:  # type: ignore[empty-body]
        """Return the model's sites, and the stems that their branches share, in the order of the forward pass."""

    @hookspec
    def ace_branch(self, site: Node, model: nn.Module, config: Config) -> nn.Module | None:
        """Return the non-equivariant module for a site or stem, on the CPU. None selects ACE's default, an MLP."""

    @hookspec
    def ace_group_action(self, model: nn.Module) -> GroupAction:  # type: ignore[empty-body]
        """Return the group and its action on the model's inputs and outputs; None if it is unknown for this model."""

    @hookspec
    def ace_preset(self) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
        """Return presets by name: "paper" has the published settings, "fit" changes ACE's defaults."""

    @hookspec
    def ace_shims(self) -> Sequence[AnyShim]:  # type: ignore[empty-body]
        """Return compatibility fixes that let this upstream run with current versions of its dependencies."""

    @hookspec
    def ace_script(self, argv: Sequence[str]) -> Script | None:
        """Return facts about the script that this command line runs; None if it is not one of upstream's scripts."""

    @hookspec
    def ace_example(self, seed: int, model: nn.Module | None) -> Example:  # type: ignore[empty-body]
        """Return a small model and a batch, made without a data set; if ``model`` is given, that model and a batch."""

    @hookspec
    def ace_demo(self) -> click.Command:  # type: ignore[empty-body]
        """Return the command for ``ace-patch demo NAME``. Without options it finishes within minutes."""

    @hookspec
    def ace_datasets(self) -> Mapping[str, click.Command]:  # type: ignore[empty-body]
        """Return a mapping from the NAME in ``ace-patch data NAME`` to the command that generates this data set."""

    @hookspec
    def ace_attached(self, model: nn.Module) -> None:
        """Observe that ACE was attached to a model."""

    @hookspec
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        """Observe training step number ``step`` (1, 2, ...) of this model, also once all sites have landed."""

    @hookspec
    def ace_finished(self, model: nn.Module) -> None:
        """Observe that this model's run ended, because the process ends or the model was projected."""
