"""The hooks of a plugin, on one page. Adapters implement the first ten, observers the last three.

Mark implementations with `hookimpl` and name their module in the entry point group ``ace_plugins``:

    from ace_plugins import adapter as ace

    @ace.hookimpl
    def ace_upstream() -> ace.Upstream:
        return ace.Upstream("MyNet", models=("mynet.model:MyNet",))

    ace_example = ace.LazyHook("ace_mynet.example:small_example")

An implementation may leave out parameters it does not use. The host calls adapter hooks one adapter at a time and
checks the results; hook wrappers are refused. Observers run in pluggy's order: the last registered first, except for
``tryfirst`` and ``trylast``. An observer that raises causes a warning, and training continues.
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
    """An implementation of an adapter hook in another module, which is imported when the hook is called.

    Every command imports every adapter, so adapters must not import torch or their upstream when they are loaded.

        ace_example = LazyHook("ace_mynet.example:small_example")  # a function, called with the hook's arguments
        ace_shims = LazyHook("ace_mynet.shims:SHIMS")  # or the hook's result itself

    Args:
        target: The object as "module:name", as in an entry point.

    Raises:
        ValueError: If the target has another form.
    """

    def __init__(self, target: str) -> None:
        if not is_object_path(target):
            raise ValueError(f"LazyHook: expected 'module:name', such as 'ace_mynet.example:example', found {target!r}")
        self.target = target

    def load(self) -> Any:
        """Import the module and return the object."""
        return pkgutil.resolve_name(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or return the object if it is the hook's result."""
        found = self.load()
        return found(*args, **kwargs) if inspect.isroutine(found) else found


@hookspec
def ace_upstream() -> Upstream:  # type: ignore[empty-body]
    """Return what this adapter patches. A plugin with this hook is an adapter."""


@hookspec
def ace_layers(model: nn.Module) -> Sequence[Node]:  # type: ignore[empty-body]
    """Return the model's sites, and the stems that their branches share, in the order of the forward pass."""


@hookspec
def ace_branch(site: Node, model: nn.Module, config: Config) -> nn.Module | None:
    """Return the non-equivariant module for a site or stem, on the CPU; None for the host's default, an MLP."""


@hookspec
def ace_group_action(model: nn.Module) -> GroupAction:  # type: ignore[empty-body]
    """Return the group and its action on the model's inputs and outputs; None if it is unknown for this model."""


@hookspec
def ace_preset() -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
    """Return named settings: "paper" as published, "fit" in addition to the host's defaults."""


@hookspec
def ace_shims() -> Sequence[AnyShim]:  # type: ignore[empty-body]
    """Return compatibility fixes that let this upstream run with current versions of its dependencies."""


@hookspec
def ace_script(argv: Sequence[str]) -> Script | None:
    """Return facts about one of upstream's scripts from its command line; None for any other script."""


@hookspec
def ace_example(seed: int, model: nn.Module | None) -> Example:  # type: ignore[empty-body]
    """Return a small model and batch made without data, or, if ``model`` is given, that model and a batch for it."""


@hookspec
def ace_demo() -> click.Command:  # type: ignore[empty-body]
    """Return the command for ``ace-patch demo NAME``. Without options it finishes within minutes."""


@hookspec
def ace_datasets() -> Mapping[str, click.Command]:  # type: ignore[empty-body]
    """Return the commands that generate this upstream's data sets, by name, for ``ace-patch data NAME``."""


@hookspec
def ace_attached(model: nn.Module) -> None:
    """Observe that ACE was attached to a model."""


@hookspec
def ace_stepped(model: nn.Module, step: int) -> None:
    """Observe that the dual loop made its step number ``step`` (1, 2, ...) for this model."""


@hookspec
def ace_finished(model: nn.Module) -> None:
    """Observe that this model's run ended, because the process ends or the model was projected."""
