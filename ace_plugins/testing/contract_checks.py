"""Checks of an adapter's hook results: its example, its sites, its optional hooks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import AddsItself, Node, Site, Stem, Tap
from ..contract.upstreams import class_path
from ..engine.state import find_argument
from ..errors import AceError
from ..plugins.claims import claims
from ..plugins.registry import recognises
from ..symmetry.parts import get_part, iterate_tensors
from .kit import CheckError, Kit, NotApplicable, different, few, node_field, require

HEAVY = ("torch", "jax", "tensorflow")


def check_importing_is_light(kit: Kit) -> None:
    """Importing the adapter imports no torch: every ace-patch command imports every plugin."""
    module = kit.plugin.target.partition(":")[0]
    if kit.plugin.distribution == "(registered)":
        raise NotApplicable("the plugin was registered as an object and has no module to import")
    code = f"import sys, importlib; importlib.import_module({module!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    require(done.returncode == 0, f"importing {module} in a new process fails: {last}", f"the top of {module}")
    heavy = [name for name in HEAVY if name in done.stdout.split()]
    top = f"the top of {module}: move heavy imports into the hooks"
    require(not heavy, f"importing {module} imports {', '.join(heavy)}", top)


def check_hooks_answer(kit: Kit) -> None:
    """Optional hooks return what the contract says, and presets contain valid settings."""
    for hook in ("ace_demo", "ace_datasets", "ace_shims"):
        if kit.plugin.has(hook):
            kit.plugin.call(hook)
    if kit.plugin.has("ace_script"):
        for argv in ((), ("an_unknown_script.py", "--epochs", "3")):
            answer = kit.plugin.call("ace_script", argv=argv)
            reason = f"ace_script returns a Script for {argv or 'no script'}, expected None for an unknown script"
            require(answer is None, reason, "ace_script, argv")
    for name in kit.plugin.presets:
        kit.plugin.configure({"preset": name})


def check_example_is_claimed(kit: Kit) -> None:
    """The example is a model that this adapter patches."""
    model, upstream = kit.example().model, kit.plugin.patches
    require(
        claims(upstream, type(model)) or recognises(kit.plugin, model),
        f"the example is a {class_path(type(model))}, which the adapter does not claim: "
        f"expected {', '.join(upstream.models) or 'a model it recognises'}",
        "ace_upstream, models" if upstream.models else "ace_upstream, recognises",
    )


def check_example_repeats(kit: Kit) -> None:
    """The example depends on the seed alone, and drawing it leaves the global random stream unchanged."""
    before = torch.random.get_rng_state()
    one, two, other = (kit.plugin.example(seed) for seed in (kit.seed, kit.seed, kit.seed + 1))
    unmoved = torch.equal(before, torch.random.get_rng_state())
    fork = "ace_example: draw inside torch.random.fork_rng(devices=[]), after setting the seed"
    require(unmoved, "ace_example advances the global random stream", fork)
    weights = different(one.model.state_dict(), two.model.state_dict())
    require(not weights, f"the same seed gives different weights: {few(weights)}", fork)
    batches = [dict(iterate_tensors({"args": example.args, "kwargs": dict(example.kwargs)})) for example in (one, two)]
    changed = different(*batches)
    require(not changed, f"the same seed gives a different batch: {few(changed)}", "ace_example, args and kwargs")
    others = different(one.model.state_dict(), other.model.state_dict())
    require(others, "another seed gives the same weights", "ace_example, seed")


def check_sites_are_named_for_people(kit: Kit) -> None:
    """Names are unique and printable, and every stem is used."""
    nodes = kit.nodes(kit.example().model)
    names = [node.name for node in nodes]
    used = {node.reads for node in nodes} | {node.through for node in nodes if isinstance(node, Site)}
    for node in nodes:
        count, field = names.count(node.name), node_field(node, "name")
        require(count == 1, f"{count} nodes are named {node.name!r}", field)
        clean = node.name.isprintable() and node.name.strip() == node.name
        require(clean, f"the name {node.name!r} has spaces around it or cannot be printed", field)
        require(not isinstance(node, Stem) or node.name in used, f"nothing reads stem {node.name!r}", field)


Calls = Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any], Any]]
"""Path of a submodule -> positional arguments, keyword arguments and output of its last call."""


def check_sites_fit_the_forward(kit: Kit) -> None:
    """Every site's module is called in the forward pass, with the inputs, outputs and shapes that the site names."""
    example = kit.example()
    nodes = list(kit.nodes(example.model))
    unchecked = _sites_that_add_themselves(kit)
    calls: dict[str, tuple[tuple[Any, ...], Mapping[str, Any], Any]] = {}

    def listen(path: str, node: Node, field: str) -> None:
        try:
            module = example.model.get_submodule(path)
        except AttributeError:
            reason = f"{node.name!r} names submodule {path!r}, which does not exist"
            raise CheckError(reason, node_field(node, field)) from None
        module.register_forward_hook(lambda _, *call: calls.update({path: call}), with_kwargs=True)

    for node in nodes:
        if isinstance(node, Site):
            listen(node.module, node, "module")
        if isinstance(node.reads, Tap):
            listen(_module_read(node), node, "reads")
    kit.call(example.model, example)
    stems = {node.name: node for node in nodes if isinstance(node, Stem)}
    problems: list[CheckError] = []
    for node in nodes:
        shape_in = stems.get(getattr(node, "through", None) or "", node).shape_in
        try:
            if isinstance(node.reads, Tap):
                _check_input(node, node.reads, example.model, calls, None if node.name in unchecked else shape_in)
            if isinstance(node, Site):
                _check_output(node, calls, None if node.name in unchecked else node.shape_out)
        except CheckError as error:
            problems.append(error)
    if problems:
        looks = dict.fromkeys(problem.look_at for problem in problems)
        raise CheckError("; ".join(problem.reason for problem in problems), "; ".join(looks))
    model, example = kit.attached()
    kit.call(model.train(), example)  # the engine has checks of its own
    kit.notes["sites:"] = str(len(model.ace.sites))


def _sites_that_add_themselves(kit: Kit) -> set[str]:
    """Return the names of sites with a branch that adds itself: these branches check what they read."""
    try:
        model, _ = kit.attached()
    except AceError:
        return set()  # reported below
    return {site.name for site in model.ace.sites if isinstance(model.ace.branch(site.name), AddsItself)}


def _module_read(node: Node) -> str:
    assert isinstance(node.reads, Tap)
    return node.reads.module if node.reads.module is not None else getattr(node, "module", "")


def _check_input(node: Node, tap: Tap, model: nn.Module, calls: Calls, shape: tuple[int, ...] | None) -> None:
    path, reads = _module_read(node), node_field(node, "reads")
    what = f"{node.name!r} reads argument {tap.argument!r} of {path or 'the model'}"
    if path not in calls and getattr(node, "module", None) == path:
        return  # reported as a problem of the output
    require(path in calls, f"{what}, which is not called in the example's forward pass", reads)
    args, kwargs, _ = calls[path]
    try:
        value = find_argument(tap, model.get_submodule(path), repr(node.name)).pick(args, kwargs)
    except (AceError, KeyError) as error:
        takes = ", ".join(inspect.signature(model.get_submodule(path).forward).parameters)
        reason = str(error) if isinstance(error, AceError) else f"{what}, which was not passed"
        raise CheckError(f"{reason} (it takes {takes})", reads) from None
    require(isinstance(value, Tensor), f"{what}, a {type(value).__name__}, expected a tensor", reads)
    _check_shape(node, what + " of shape", value, shape, "shape_in")


def _check_output(site: Site, calls: Calls, shape: tuple[int, ...] | None) -> None:
    where, field = f"site {site.name!r}: {site.module}", node_field(site, "output")
    called = site.module in calls
    require(called, f"{where} is not called in the example's forward pass", node_field(site, "module"))
    output = calls[site.module][2]
    if site.output is not None:
        try:
            output = get_part(output, str(site.output), where)
        except AceError as error:
            raise CheckError(str(error), field) from None
    reason = f"{where} returns a {type(output).__name__}, expected a tensor: choose one of its outputs"
    require(isinstance(output, Tensor), reason, field)
    _check_shape(site, where + " returns shape", output, shape, "shape_out")


def _check_shape(node: Node, what: str, value: Tensor, shape: tuple[int, ...] | None, field: str) -> None:
    place = "end with" if node.axis == -1 else f"have in dimension {node.axis}"
    fits = shape is None or node.sizes(value.shape, shape) == shape
    require(fits, f"{what} {tuple(value.shape)}, which does not {place} {shape}", node_field(node, field))
