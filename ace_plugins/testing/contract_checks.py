"""What an adapter answers: its hooks, its example, its sites. Nothing is attached yet, or only just."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import AddsItself, Site, Stem, Tap
from ..contract.upstreams import class_path
from ..engine.state import resolve
from ..errors import AceError
from ..plugins.claims import claims
from ..plugins.registry import sees
from ..symmetry.parts import part_of, tensors_in
from .kit import CheckError, Kit, NotApplicable, different, node_field

HEAVY = ("torch", "jax", "tensorflow")


def check_importing_is_light(kit: Kit) -> None:
    """Every command of ace-patch imports every plugin: none may make people wait for torch."""
    module = kit.plugin.target.partition(":")[0]
    if kit.plugin.distribution == "(registered)":
        raise NotApplicable("the plugin was registered as an object: there is no import to judge")
    code = f"import sys, importlib; importlib.import_module({module!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckError(f"importing {module} in a process of its own fails: {last}", f"the top of {module}")
    heavy = [name for name in HEAVY if name in done.stdout.split()]
    if heavy:
        raise CheckError(
            f"importing {module} imports {', '.join(heavy)}",
            f"the top of {module}: move such imports into hooks",
        )


def check_hooks_answer(kit: Kit) -> None:
    """Hooks that nobody else asks here answer what the contract says, and presets are settings there are."""
    for hook in ("ace_demo", "ace_datasets", "ace_shims"):
        if kit.plugin.has(hook):
            kit.plugin.call(hook)
    if kit.plugin.has("ace_script"):
        for argv in ((), ("a_script_of_nobody.py", "--epochs", "3")):
            if kit.plugin.call("ace_script", argv=argv) is not None:
                raise CheckError(
                    f"ace_script answers for {argv or 'no script'}, expected None for a script it does not know",
                    "ace_script, argv",
                )
    for name in kit.plugin.presets:
        kit.plugin.configured({"preset": name})


def check_example_is_claimed(kit: Kit) -> None:
    """The example is a model that this adapter says it patches."""
    model, upstream = kit.example().model, kit.plugin.patches
    if not claims(upstream, type(model)) and not sees(kit.plugin, model):
        raise CheckError(
            f"the example is a {class_path(type(model))}, which is not among {', '.join(upstream.models) or 'them'}",
            "ace_upstream, models" if upstream.models else "ace_upstream, recognises",
        )


def check_example_repeats(kit: Kit) -> None:
    """The same seed gives the same model and batch, another seed another, and the random stream stays where it is."""
    before = torch.random.get_rng_state()
    one, two, other = (kit.plugin.example(seed) for seed in (kit.seed, kit.seed, kit.seed + 1))
    if not torch.equal(before, torch.random.get_rng_state()):
        raise CheckError("ace_example moves the global random stream", "ace_example: torch.random.fork_rng(devices=[])")
    weights = different(one.model.state_dict(), two.model.state_dict())
    if weights:
        raise CheckError(
            f"the same seed gives other weights: {_few(weights)}", "ace_example: seed inside torch.random.fork_rng"
        )
    batches = [dict(tensors_in({"args": example.args, "kwargs": dict(example.kwargs)})) for example in (one, two)]
    moved = different(*batches)
    if moved:
        raise CheckError(f"the same seed gives another batch: {_few(moved)}", "ace_example, args and kwargs")
    if not different(one.model.state_dict(), other.model.state_dict()):
        raise CheckError("another seed gives the same weights", "ace_example, seed")


def check_sites_are_named_for_people(kit: Kit) -> None:
    """Names are unique and readable, and every stem is read by somebody."""
    nodes = kit.nodes(kit.example().model)
    names = [node.name for node in nodes]
    for node in nodes:
        if names.count(node.name) > 1:
            raise CheckError(f"{names.count(node.name)} nodes are named {node.name!r}", node_field(node, "name"))
        if not node.name.isprintable() or node.name.strip() != node.name:
            raise CheckError(
                f"the name {node.name!r} has spaces around it or cannot be printed", node_field(node, "name")
            )
    read = {node.reads for node in nodes} | {node.through for node in nodes if isinstance(node, Site)}
    for node in nodes:
        if isinstance(node, Stem) and node.name not in read:
            raise CheckError(f"nothing reads stem {node.name!r}", node_field(node, "name"))


def check_sites_fit_the_forward(kit: Kit) -> None:
    """In a forward of the example every site's module runs, and gives and is given what the site says."""
    example = kit.example()
    nodes = list(kit.nodes(example.model))
    heard = _Heard(example.model, _judging_themselves(kit))
    stems = {node.name: node for node in nodes if isinstance(node, Stem)}
    for node in nodes:
        if isinstance(node, Site):
            heard.listen(node, node.module)
        if isinstance(node.reads, Tap):
            heard.listen(node, node.reads.module if node.reads.module is not None else getattr(node, "module", ""))
    kit.call(example.model, example)
    problems: list[CheckError] = []
    for node in nodes:
        first = stems.get(getattr(node, "through", None) or "", node)
        if isinstance(node.reads, Tap):
            module = node.reads.module if node.reads.module is not None else getattr(node, "module", "")
            problems += heard.read(node, module, first.shape_in)
        if isinstance(node, Site):
            problems += heard.given(node)
    if problems:
        looks = list(dict.fromkeys(problem.look_at for problem in problems))
        raise CheckError("; ".join(problem.reason for problem in problems), "; ".join(looks))
    model, example = kit.attached()
    kit.call(model.train(), example)  # what the engine refuses besides
    kit.notes["sites:"] = str(len(model.ace.sites))


def _judging_themselves(kit: Kit) -> set[str]:
    """Return the sites of which the branches add themselves: these branches check what they read."""
    try:
        model, _ = kit.attached()
    except AceError:
        return set()  # it is told by what follows
    return {site.name for site in model.ace.sites if isinstance(model.ace.branch(site.name), AddsItself)}


class _Heard:
    """The calls of submodules in one forward."""

    def __init__(self, model: nn.Module, free: set[str]) -> None:
        self.model = model
        self.free = free
        """Nodes whose features need not be the trailing dimensions."""
        self.calls: dict[str, tuple[tuple[Any, ...], Mapping[str, Any], Any]] = {}

    def listen(self, node: Site | Stem, path: str) -> None:
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            field = "module" if isinstance(node, Site) and node.module == path else "reads"
            told = f"{node.name!r} names submodule {path!r}, which does not exist"
            raise CheckError(told, node_field(node, field)) from None
        module.register_forward_hook(
            lambda _, args, kwargs, output: self.calls.__setitem__(path, (args, kwargs, output)), with_kwargs=True
        )

    def given(self, site: Site) -> Iterator[CheckError]:
        """What is wrong with the output that a site names."""
        who = f"site {site.name!r}: {site.module}"
        if site.module not in self.calls:
            yield CheckError(f"{who} is not called in the example's forward", node_field(site, "module"))
            return
        output = self.calls[site.module][2]
        if site.output is not None:
            try:
                output = part_of(output, str(site.output), who)
            except AceError as error:
                yield CheckError(str(error), node_field(site, "output"))
                return
        if not isinstance(output, Tensor):
            told = f"{who} gives a {type(output).__name__}, expected a tensor"
            yield CheckError(f"{told}: say which of its outputs", node_field(site, "output"))
        elif site.name not in self.free and site.sizes(output.shape, site.shape_out) != site.shape_out:
            found = f"{who} gives shape {tuple(output.shape)}, which does not {_having(site)} {site.shape_out}"
            yield CheckError(found, node_field(site, "shape_out"))

    def read(self, node: Site | Stem, path: str, shape: tuple[int, ...]) -> Iterator[CheckError]:
        """What is wrong with the argument that a site or stem reads."""
        assert isinstance(node.reads, Tap)
        what = f"argument {node.reads.argument!r} of {path or 'the model'}"
        if path not in self.calls:
            if getattr(node, "module", None) != path:
                told = f"{node.name!r} reads {what}, which is not called in the example's forward"
                yield CheckError(told, node_field(node, "reads"))
            return
        args, kwargs, _ = self.calls[path]
        try:
            value = resolve(node.reads, self.model.get_submodule(path), repr(node.name)).pick(args, kwargs)
        except (AceError, KeyError) as error:
            takes = ", ".join(inspect.signature(self.model.get_submodule(path).forward).parameters)
            told = str(error) if isinstance(error, AceError) else f"{node.name!r} reads {what}, which was not given"
            yield CheckError(f"{told} (it takes {takes})", node_field(node, "reads"))
            return
        if not isinstance(value, Tensor):
            told = f"{node.name!r} reads {what}, a {type(value).__name__}, expected a tensor"
            yield CheckError(told, node_field(node, "reads"))
        elif node.name not in self.free and node.sizes(value.shape, shape) != shape:
            told = f"{node.name!r} reads {what} of shape {tuple(value.shape)}, which does not {_having(node)} {shape}"
            yield CheckError(told, node_field(node, "shape_in"))


def _having(node: Site | Stem) -> str:
    return "end with" if node.axis == -1 else f"have in dimension {node.axis}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
