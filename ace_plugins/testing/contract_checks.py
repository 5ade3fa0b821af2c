"""Checks of an adapter's hook results: its example, its sites, its optional hooks."""

from __future__ import annotations

import subprocess
import sys

import torch

from ..contract.sites import Site, Stem
from ..contract.upstreams import class_path
from ..plugins.claims import claims
from ..plugins.registry import recognises
from ..symmetry.parts import iterate_tensors
from .kit import Kit, NotApplicable, different, few, node_field, outputs_of, require

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


def check_sites_fit_the_forward(kit: Kit) -> None:
    """Every site's module is called in the forward pass, with the inputs, outputs and shapes that the site names."""
    model, example = kit.attached()
    with outputs_of(model.train(), model.ace.sites) as seen:
        kit.call(model, example)  # the engine refuses inputs, outputs and shapes that do not fit
    for site in model.ace.sites:
        reason = f"site {site.name!r}: {site.module} is not called in the example's forward pass"
        require(site.name in seen, reason, node_field(site, "module"))
    kit.notes["sites:"] = str(len(model.ace.sites))
