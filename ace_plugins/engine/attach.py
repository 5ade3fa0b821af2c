"""Attaches ACE to a model, after checking everything, and removes ACE from it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from ..contract.sites import Node, Site, Stem, Tap
from ..contract.upstreams import class_path
from ..errors import AceWarning, AdapterError, AttachError, ConfigError
from ..plugins.plugin import AnswerError, Plugin
from ..plugins.registry import notify
from ..settings.config import UNBOUNDED, Config
from ..settings.fields import parse_axis
from ..symmetry.actions import GroupAction
from ..symmetry.measure import forward_names
from ..symmetry.parts import Argument, find_argument
from ..symmetry.subgroups import SO2About
from .branches import fork_random_stream, mlp
from .checkpoint import check_state
from .forward import ModelHooks, uninstall
from .holdout import separate
from .measure import get_ace
from .scheduled import relax
from .spectral_norm import bound, find_bounded, find_unbounded, settle
from .state import LIVE, NAME, Ace, find, key

M = TypeVar("M", bound=nn.Module)


def check_nodes(nodes: Sequence[Node], model: nn.Module, adapter: str) -> dict[str, Argument]:
    """Check that an adapter's sites and stems fit the model. Returns the argument that each reads, keyed by name.

    Raises:
        AdapterError: If anything does not fit. The error lists all problems.
    """
    who, kind = f"adapter {adapter!r}", class_path(type(model))
    if not any(isinstance(node, Site) for node in nodes):
        raise AdapterError(
            f"{who} finds no site in {kind}: ace_layers returned {len(nodes)} nodes, expected at least one Site; check "
            "that the model has its layers and that the adapter is the right one"
        )
    arguments: dict[str, Argument] = {}
    seen: dict[str, Node] = {}
    taken: dict[tuple[int, int | str | None], str] = {}
    problems: list[str] = []
    for node in nodes:
        if key(node.name) in seen:
            problems.append(f"{seen[key(node.name)].name!r} and {node.name!r} count as one name ('.' equals '_')")
        if isinstance(node, Site):
            try:
                place = (id(model.get_submodule(node.module)), node.output)
            except AttributeError:
                problems.append(f"site {node.name!r} names submodule {node.module!r}, which does not exist")
                continue
            if place in taken:  # each call of the submodule would add both branches
                problems.append(f"sites {taken[place]!r} and {node.name!r} name the same submodule")
            taken[place] = node.name
            stem = seen.get(key(node.through or ""))
            through = f"goes through {node.through!r}"
            if node.through and not (isinstance(stem, Stem) and stem.reads is None):
                problems.append(f"{node.name!r} {through}, which is not an earlier stem with reads=None")
            elif node.through and stem is not None and stem.shape_out != node.shape_in:
                problems.append(
                    f"{node.name!r} has shape_in {node.shape_in} but {through} of shape_out {stem.shape_out}"
                )
        if isinstance(node.reads, str):
            earlier = seen.get(key(node.reads))
            if earlier is None:
                problems.append(f"{node.name!r} reads {node.reads!r}, which is not an earlier stem or site")
            elif isinstance(earlier, Stem) and earlier.reads is None:
                problems.append(f"{node.name!r} reads {node.reads!r}, which has reads=None; set through= instead")
        elif node.reads is not None:
            path = getattr(node, "module", None) if node.reads.module is None else node.reads.module
            try:
                if path is None:
                    raise AdapterError(f"stem {node.name!r} reads a Tap without a module; set Tap(module=...)")
                arguments[node.name] = find_argument(node.reads, path, model, repr(node.name))
            except (AttributeError, AdapterError) as error:
                problems.append(str(error))
        seen[key(node.name)] = node
    if problems:
        raise AdapterError(f"{who} does not fit {kind}: {'; '.join(problems)}")
    return arguments


def prepare(model: nn.Module, plugin: Plugin, config: Config) -> Ace | None:
    """Build and check everything that ACE adds to a model, without changing the model. Returns None in mode "off"."""
    if find(model) is not None:
        name = type(model).__name__
        raise AttachError(f"ACE is already attached to this {name} (model.{NAME}); call project(model) before attach")
    if hasattr(model, NAME):
        raise AttachError(f"{class_path(type(model))} already has an attribute {NAME!r}, which ACE needs: rename it")
    if config.mode == "off":
        return None
    nodes = list(plugin.call("ace_layers", model=model))
    arguments = check_nodes(nodes, model, plugin.name)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    action = _find_action(plugin, model, config)
    known = plugin.patches.evaluating.keys() <= inspect.signature(model.forward).parameters.keys()
    evaluating = plugin.patches.evaluating if known else {}
    with fork_random_stream(), torch.device("cpu"):
        ace = Ace(
            plugin.name,
            config,
            nodes,
            arguments,
            branches={node.name: _build_branch(plugin, node, model, config) for node in nodes},
            script=plugin.call("ace_script", argv=tuple(sys.argv)) if plugin.has("ace_script") else None,
            action=action,
            evaluating=[(find_argument(Tap(name), "", model, name), value) for name, value in evaluating.items()],
            # Steps of gamma and the duals are too small for half precision.
            dtype=torch.float64 if like.dtype == torch.float64 else torch.float32,
        )
    ace.branches.to(dtype=like.dtype)
    ace.to(device=like.device)
    settle(find_bounded(ace.branches))
    kinds = sorted({kind for site in ace.sites for kind in find_unbounded(ace.branch(site.name))})
    if config.deploys_branches and kinds:
        unreached = f"mode {config.mode!r} with branches that spectral_norm does not reach ({', '.join(kinds)} of "
        text = next(iter(config.cautions), f"{unreached}adapter {ace.adapter!r}): {UNBOUNDED}")
        warnings.warn(text, AceWarning, stacklevel=3)
    return ace


def put_on(ace: Ace, model: nn.Module) -> None:
    """Add an `Ace` from `prepare` to its model as a submodule, and register the hooks."""
    ace.train(model.training)
    nn.Module.add_module(model, NAME, ace)  # the add_module of a container class may refuse it
    ace.belong_to(model)
    hooks = ace.hooks = ModelHooks(model)
    hooks.sync(ace)
    hooks.verified = False  # a subclass's constructor may still replace submodules: the first forward pass checks again
    hooks.permanent.append(model.register_load_state_dict_pre_hook(check_state))  # type: ignore[no-untyped-call]
    LIVE.add(ace)
    notify("ace_attached", model=model)


def project(model: M) -> M:
    """Remove ACE from a model in place. This leaves f_eq: the plain upstream model with its own parameters and keys.

    Args:
        model: The attached model itself, not a wrapper around it.

    Returns:
        The same model. Warns if this changes the output of ``model.eval()``, because the branches were deployed.

    Raises:
        AttachError: If the model has no ACE attached.
    """
    ace = get_ace(model)
    largest = float(ace.gamma.detach().abs().max())
    if ace.in_eval and not largest <= 1e-3:
        why = f"max |gamma| is {largest:.3g} and mode {ace.config.mode!r} uses the branches in model.eval()"
        text = f"project removes ACE from {type(model).__name__} and changes its output: {why}"
        warnings.warn(text, AceWarning, stacklevel=2)
    if ace.duals.count:
        notify("ace_finished", model=model)
    uninstall(ace, model)
    return model


def _find_action(plugin: Plugin, model: nn.Module, config: Config) -> GroupAction | None:
    """Return the group action, for random frames and to find samples; None if it is unknown or not needed."""
    action: GroupAction | None = None
    if (config.turns or config.held_out) and plugin.has("ace_group_action"):
        try:
            action = plugin.call("ace_group_action", model=model)
        except AdapterError as error:
            # If the error has no ``__cause__``, the adapter raised it on purpose: it has no action for this model.
            failed = error.__cause__ is not None or isinstance(error, AnswerError)
            if config.turns and (config.frames != "auto" or failed):
                raise
            if config.turns:
                warnings.warn(f"training without random frames: {error}", AceWarning, stacklevel=4)
    names = forward_names(model)
    if action is not None and not {path.partition(".")[0] for path in action.inputs} <= {*names}:
        action = None  # the forward of a subclass may have other arguments
    if action is None and config.turns and config.frames != "auto":
        forward = f"{type(model).__name__}.forward({', '.join(names)})"
        raise ConfigError(
            f"frames {config.frames!r}: adapter {plugin.name!r} does not define the group action on {forward} "
            "(ace_group_action); set frames = 'off'"
        )
    if action is not None and (axis := parse_axis(config.frames)):
        if getattr(action.group, "dimension", None) != 3:
            found = f"the group of this model is {action.group.name}"
            raise ConfigError(f"frames {config.frames!r}: expected a group of rotations of space, {found}; set 'off'")
        action = replace(action, group=SO2About(axis))
    return action


def _build_branch(plugin: Plugin, node: Node, model: nn.Module, config: Config) -> nn.Module:
    made = plugin.call("ace_branch", site=node, model=model, config=config) if plugin.has("ace_branch") else None
    branch: nn.Module = mlp(node) if made is None else made
    if config.mode == "scheduled":
        return relax(node, branch)  # penalties keep this branch small, so it is not bounded
    if config.bounds_branches and not (isinstance(node, Stem) and not node.bounded):
        branch = bound(branch)
    return separate(branch) if config.held_out else branch
