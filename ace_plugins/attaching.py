"""attach and project: put ACE on a model, take it off again; and what the model's ACE is doing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from . import branches as default_branches
from .checkpoints import CheckpointHook
from .config import Config, build
from .contract import Node, Site, Stem, Tap, class_path
from .equivariance import EquivarianceError, measure
from .errors import AdapterError, AttachError
from .forwards import install, sync, uninstall
from .plugins import Plugin, registry
from .relaxation import NAME, Ace, find, key
from .shims import apply_shims
from .steps import unwatch, watch
from .taps import Argument, resolve
from .trace import observers

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
    nodes = list(plugin.call("ace_layers", model=model) or ())
    arguments = _checked(nodes, model, plugin)
    if settings.mode == "off":
        apply_shims(plugin)
        return model
    ace = _made(model, plugin, settings, nodes, arguments)
    apply_shims(plugin)
    install(ace, model)
    hook = CheckpointHook()
    ace.permanent.append(model.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    watch(ace)
    observers().ace_attached(model=model)
    return model


def configured(plugin: Plugin, settings: Mapping[str, Any]) -> Config:
    """The settings over the adapter's presets, checked."""
    return build(settings, plugin.call("ace_preset") if plugin.has("ace_preset") else None)


def project(model: M) -> M:
    """Remove ACE in place: what stays is plain upstream, f_eq, with its own parameters and keys."""
    ace = attached(model)
    if ace.duals.count:
        observers().ace_finished(model=model)
    unwatch(ace)
    uninstall(ace, model)
    return model


def attached(model: nn.Module) -> Ace:
    """The model's ACE, or an error that says how it gets one."""
    ace = find(model)
    if ace is None:
        inner = getattr(model, "module", None)
        hint = "pass the model inside the wrapper" if isinstance(inner, nn.Module) else "call attach(model) first"
        raise AttachError(f"{type(model).__name__} has no ACE attached: expected model.{NAME}; {hint}")
    return ace


@contextmanager
def use_branches(model: nn.Module, on: bool) -> Iterator[None]:
    """Evaluate f_eq (``on=False``) or f_eq + gamma f_neq (``on=True``), whatever the mode says."""
    ace = attached(model)
    before, ace.forced = ace.forced, on
    sync(ace, model)
    try:
        yield
    finally:
        ace.forced = before
        sync(ace, model)


@dataclass(frozen=True)
class SiteStatus:
    """One site: its gamma, lambda and u, and how many parameters its branch has."""

    name: str
    module: str
    gamma: float
    lambda_: float
    u: float
    branch_parameters: int


@dataclass(frozen=True)
class Status:
    """What ACE is doing to a model. In mode "off" there are no sites."""

    adapter: str
    mode: str
    steps: int
    landed: bool
    upstream_parameters: int
    ace_parameters: int
    stem_parameters: int
    sites: tuple[SiteStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with lambda under its own name."""
        plain = dataclasses.asdict(self)
        plain["sites"] = [{("lambda" if k == "lambda_" else k): v for k, v in site.items()} for site in plain["sites"]]
        return plain


def status(model: nn.Module) -> Status:
    """Per site gamma, lambda, u and branch parameters. A model without ACE has mode "off" and no sites."""
    ace = find(model)
    total = sum(p.numel() for p in model.parameters())
    if ace is None:
        return Status("", "off", 0, False, total, 0, 0, ())
    added = sum(p.numel() for p in ace.parameters())
    values = zip(ace.gamma.tolist(), ace.duals.lambda_.tolist(), ace.duals.u.tolist(), strict=True)
    sites = tuple(
        SiteStatus(site.name, site.module, gamma, lambda_, u, _count(ace.branch(site.name)))
        for site, (gamma, lambda_, u) in zip(ace.sites, values, strict=True)
    )
    stems = sum(_count(ace.branch(name)) for name, node in ace.nodes.items() if isinstance(node, Stem))
    return Status(ace.adapter, ace.config.mode, ace.duals.count, ace.landed, total - added, added, stems, sites)


def equivariance_error(
    model: nn.Module, batch: Any, samples: int = 5, *, branches_on: bool | None = None, seed: int = 0
) -> EquivarianceError:
    """Mean over random group elements of ||rho_Y(g) f(x) - f(rho_X(g) x)||, in eval mode.

    ``batch`` is a tuple of positional arguments, a dict of keyword arguments or a single argument of the
    model's forward. ``branches_on`` measures f_eq + gamma f_neq (True) or f_eq (False); by default what the
    mode deploys. Works on plain upstream models too, as long as an adapter claims them.
    """
    ace = find(model)
    plugin = registry().adapter(ace.adapter) if ace is not None else registry().claiming(type(model))
    action = plugin.call("ace_group_action", model=model)
    if ace is None or branches_on is None:
        return measure(model, action, batch, samples=samples, seed=seed)
    with use_branches(model, branches_on):
        return measure(model, action, batch, samples=samples, seed=seed)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _checked(nodes: Sequence[Node], model: nn.Module, plugin: Plugin) -> dict[str, Argument]:
    """Every node against the model; all problems in one error. Returns what each node's tap means."""
    who = f"adapter {plugin.name!r}"
    if not any(isinstance(node, Site) for node in nodes):
        raise AdapterError(
            f"{who} finds no site in {class_path(type(model))}: ace_layers returned {len(nodes)} nodes, expected at "
            "least one Site; check that the model has its layers and that the adapter is the right one"
        )
    arguments: dict[str, Argument] = {}
    seen: dict[str, str] = {}
    problems: list[str] = []
    for node in nodes:
        if key(node.name) in seen:
            problems.append(f"two nodes are named {node.name!r} (or {seen[key(node.name)]!r})")
        if isinstance(node, Site):
            try:
                model.get_submodule(node.module)
            except AttributeError:
                problems.append(f"site {node.name!r} names submodule {node.module!r}, which does not exist")
                continue
        if isinstance(node.reads, str):
            if key(node.reads) not in seen:
                problems.append(f"{node.name!r} reads {node.reads!r}, which is no earlier stem or site")
        else:
            try:
                arguments[node.name] = _argument(node, node.reads, model)
            except (AttributeError, AdapterError) as error:
                problems.append(str(error))
        seen[key(node.name)] = node.name
    if problems:
        raise AdapterError(f"{who} does not fit {class_path(type(model))}: {'; '.join(problems)}")
    return arguments


def _argument(node: Node, tap: Tap, model: nn.Module) -> Argument:
    path = tap.module
    if path is None:
        if not isinstance(node, Site):
            raise AdapterError(f"stem {node.name!r} must say which module it reads from")
        path = node.module
    return resolve(tap, model.get_submodule(path), repr(node.name))


def _made(
    model: nn.Module, plugin: Plugin, config: Config, nodes: Sequence[Node], arguments: Mapping[str, Argument]
) -> Ace:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    made: dict[str, nn.Module] = {}
    with default_branches.forked_random_stream(), torch.device("cpu"):
        for node in nodes:
            branch = plugin.call("ace_branch", site=node, config=config) if plugin.has("ace_branch") else None
            if branch is not None and not isinstance(branch, nn.Module):
                raise AdapterError(
                    f"adapter {plugin.name!r}: ace_branch returned {type(branch).__name__} for {node.name!r}, "
                    "expected a torch.nn.Module or None"
                )
            made[node.name] = default_branches.mlp(node) if branch is None else branch
            if config.spectral_norm:
                default_branches.bound(made[node.name])
        # gamma and the duals take small steps for a long time: never in half precision.
        precise = torch.float64 if like.dtype == torch.float64 else torch.float32
        ace = Ace(plugin.name, config, nodes, arguments, made, dtype=precise, device=torch.device("cpu"))
    ace.branches.to(dtype=like.dtype)
    return ace.to(device=like.device)
