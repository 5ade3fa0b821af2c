"""attach and project: put ACE on a model, take it off again; and measure it with and without its branches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from . import branches as default_branches
from .bounded import bound, maps, settle, unbounded
from .checkpoints import CheckpointHook
from ..settings.config import UNBOUNDED, Config, build
from ..contract.data import Node, Stem, class_path
from .duals import cooper
from ..symmetry.measuring import EquivarianceError, measure
from ..errors import AceWarning, AdapterError, AttachError
from .forwards import install, sync, uninstall
from .checks import checked
from ..plugins.observers import tell
from ..plugins.registry import Plugin, registry
from .state import NAME, Ace, find, unwrapped
from ..patch.shims import apply_shims, check_device
from .steps import unwatch, watch
from .taps import Argument

M = TypeVar("M", bound=nn.Module)


def attach(model: M, adapter: str | None = None, **config: Any) -> M:
    """Put ACE on a model, in place, and return it.

    ``adapter`` is the name of an adapter; without it the adapters are asked who claims the model. ``config``
    are fields of `Config`, and ``preset`` for a named set of the adapter's. Everything is checked before
    anything is changed. In mode "off" the model stays as it is, down to its parameters.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"cannot attach to {type(model).__name__}: expected a torch.nn.Module")
    plugin = registry().adapter(adapter) if adapter is not None else registry().claiming(type(model))
    settings = configured(plugin, config)
    if find(model) is not None:
        raise AttachError(
            f"{type(model).__name__} is attached already (model.{NAME}); call project(model) first to attach anew"
        )
    if hasattr(model, NAME):
        raise AttachError(f"{class_path(type(model))} has an attribute {NAME!r} of its own; ACE needs that name")
    if settings.mode == "off":
        if settings.shims:
            apply_shims(plugin, settings.device)
        return model
    nodes = list(plugin.call("ace_layers", model=model) or ())
    arguments = checked(nodes, model, plugin.name)
    ace = _made(model, plugin, settings, nodes, arguments)
    _caution(ace)
    if settings.shims:
        apply_shims(plugin, settings.device)
    install(ace, model)
    hook = CheckpointHook()
    ace.permanent.append(model.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    watch(ace)
    tell("ace_attached", model=model)
    return model


def _caution(ace: Ace) -> None:
    """Say what deploying branches costs that are not bounded, whoever was to bound them."""
    kinds = sorted({kind for site in ace.sites for kind in unbounded(ace.branch(site.name))})
    if not ace.config.deploys_branches or not kinds:
        return
    told = ace.config.cautions or (
        f"mode {ace.config.mode!r} with branches that spectral_norm does not reach ({', '.join(kinds)} of adapter "
        f"{ace.adapter!r}): {UNBOUNDED}",
    )
    warnings.warn(told[0], AceWarning, stacklevel=3)


def configured(plugin: Plugin, settings: Mapping[str, Any]) -> Config:
    """The settings over the adapter's presets, checked."""
    config = build(settings, plugin.presets)
    if config.dual_optimizer == "nupi":
        cooper()  # missing is told now, not at the first model
    check_device(plugin, config)
    return config


def project(model: M) -> M:
    """Remove ACE in place: what stays is plain upstream, f_eq, with its own parameters and keys."""
    ace = attached(model)
    largest = float(ace.gamma.detach().abs().max())
    if ace.in_eval and not largest <= 1e-3:
        warnings.warn(
            f"projecting {type(model).__name__} to f_eq although max |gamma| is {largest:.3g} and mode "
            f"{ace.config.mode!r} deploys the branches: model.eval() changes",
            AceWarning,
            stacklevel=2,
        )
    if ace.duals.count:
        tell("ace_finished", model=model)
    unwatch(ace)
    uninstall(ace, model)
    return model


def attached(model: nn.Module) -> Ace:
    """The model's ACE, or an error that says how it gets one."""
    ace = find(model)
    if ace is None:
        inner = unwrapped(model) is not model
        hint = "pass the model inside the wrapper" if inner else "call attach(model) first"
        raise AttachError(f"{type(model).__name__} has no ACE attached: expected model.{NAME}; {hint}")
    return ace


@contextmanager
def use_branches(model: nn.Module, on: bool) -> Iterator[None]:
    """Evaluate f_eq (``on=False``) or f_eq + gamma f_neq (``on=True``), whatever the mode says."""
    model = unwrapped(model)
    ace = attached(model)
    before, ace.forced = ace.forced, on
    sync(ace, model)
    try:
        yield
    finally:
        if find(model) is ace:  # it may have been projected inside
            ace.forced = before
            sync(ace, model)


def equivariance_error(
    model: nn.Module, batch: Any, samples: int = 5, *, branches_on: bool | None = None, seed: int = 0
) -> EquivarianceError:
    """Mean over random group elements of ||rho_Y(g) f(x) - f(rho_X(g) x)||, in eval mode.

    ``batch`` is a tuple of positional arguments, a dict of keyword arguments or a single argument of the
    model's forward. ``branches_on`` measures f_eq + gamma f_neq (True) or f_eq (False); by default what the
    mode deploys. Works on plain upstream models too, as long as an adapter claims them.
    """
    model = unwrapped(model)
    ace = find(model)
    plugin = registry().adapter(ace.adapter) if ace is not None else registry().claiming(type(model))
    action = plugin.call("ace_group_action", model=model)
    if ace is None or branches_on is None:
        return measure(model, action, batch, samples=samples, seed=seed)
    with use_branches(model, branches_on):
        return measure(model, action, batch, samples=samples, seed=seed)


def _made(
    model: nn.Module, plugin: Plugin, config: Config, nodes: Sequence[Node], arguments: Mapping[str, Argument]
) -> Ace:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    made: dict[str, nn.Module] = {}
    with default_branches.forked_random_stream(), torch.device("cpu"):
        for node in nodes:
            branch = (
                plugin.call("ace_branch", site=node, model=model, config=config) if plugin.has("ace_branch") else None
            )
            if branch is not None and not isinstance(branch, nn.Module):
                raise AdapterError(
                    f"adapter {plugin.name!r}: ace_branch returned {type(branch).__name__} for {node.name!r}, "
                    "expected a torch.nn.Module or None"
                )
            branch = default_branches.mlp(node) if branch is None else branch
            unbound = isinstance(node, Stem) and not node.bounded
            made[node.name] = bound(branch) if config.spectral_norm and not unbound else branch
        # gamma and the duals take small steps for a long time: never in half precision.
        precise = torch.float64 if like.dtype == torch.float64 else torch.float32
        ace = Ace(plugin.name, config, nodes, arguments, made, dtype=precise, device=torch.device("cpu"))
    ace.branches.to(dtype=like.dtype)
    ace.to(device=like.device)
    settle(maps(ace.branches))
    return ace
