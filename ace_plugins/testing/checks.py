"""The checks that every adapter must pass: functions ``check_*(kit)`` that raise `CheckError` on failure."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site, Stem
from ..contract.upstreams import class_path
from ..engine.attach import project
from ..engine.checkpoint import export
from ..engine.measure import equivariance_error, use_branches
from ..patch.constructors import attach
from ..plugins.claims import claims
from ..plugins.plugin import one_line
from ..plugins.registry import recognises
from ..report.status import status
from ..symmetry.measure import EquivarianceError, compare_orders, evaluate
from ..symmetry.parts import iterate_tensors
from .audit import FLOOR
from .kit import (
    PLAIN,
    CheckError,
    Kit,
    NotApplicable,
    convert_to_double,
    different,
    hide_warnings,
    node_field,
    refuse,
    require,
    same,
)

CHANGES = "ace_layers and ace_branch: changes to the model"
ADDS = "ace_branch: modules or parameters added to the model"
STATE = "ace_branch: state shared outside the branch"
FRAMES = 1e-3  # largest relative change of f_eq that float32 rounding may cause in a random frame
BROKEN = 1e-6  # smallest relative equivariance error that counts as broken, at gamma = 1


def check_importing_is_light(kit: Kit) -> None:
    """Importing the adapter does not import torch, because every ace-patch command imports every plugin."""
    module = kit.plugin.target.partition(":")[0]
    if kit.plugin.distribution == "(registered)":
        raise NotApplicable("the plugin was registered as an object and has no module to import")
    # The new process searches the same folders. By itself it would also import modules from the current folder.
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    top, last = f"the top of {module}", (done.stderr.strip().splitlines() or ["no message"])[-1]
    require(done.returncode == 0, f"importing {module} in a new process fails: {last}", top)
    heavy = [name for name in ("torch", "jax", "tensorflow") if name in done.stdout.split()]
    refuse(heavy, f"importing {module} imports {{}}", f"{top}: move heavy imports into the hooks")


def check_hooks_answer(kit: Kit) -> None:
    """Optional hooks return valid results, and presets contain valid settings."""
    for hook in ("ace_demo", "ace_datasets", "ace_shims"):
        if kit.plugin.has(hook):
            kit.plugin.call(hook)
    for argv in ((), ("an_unknown_script.py", "--epochs", "3")) if kit.plugin.has("ace_script") else ():
        answer = kit.plugin.call("ace_script", argv=argv)
        reason = f"ace_script returns a Script for {argv or 'no script'}, expected None for an unknown script"
        require(answer is None, reason, "ace_script, argv")
    for name in kit.plugin.presets:
        kit.plugin.resolve(arguments={"preset": name})


def check_example_is_claimed(kit: Kit) -> None:
    """The adapter supports the model of its own example."""
    model, upstream = kit.plain(), kit.plugin.patches
    expected = ", ".join(upstream.models) or "a model it recognises"
    reason = f"the example is a {class_path(type(model))}, which the adapter does not support: expected {expected}"
    look_at = "ace_upstream, models" if upstream.models else "ace_upstream, recognises"
    require(claims(upstream, type(model)) or recognises(kit.plugin, model), reason, look_at)


def check_example_repeats(kit: Kit) -> None:
    """The example depends on the seed only, and building it leaves the global random stream unchanged."""
    before = torch.random.get_rng_state()
    one, two, other = (kit.plugin.example(seed) for seed in (kit.seed, kit.seed, kit.seed + 1))
    fork = "ace_example: draw inside torch.random.fork_rng(devices=[]), after setting the seed"
    unmoved = torch.equal(before, torch.random.get_rng_state())
    require(unmoved, "ace_example advances the global random stream", fork)
    weights = [example.model.state_dict() for example in (one, two, other)]
    refuse(different(*weights[:2]), "the same seed gives different weights: {}", fork)
    batches = [dict(iterate_tensors({"args": example.args, "kwargs": dict(example.kwargs)})) for example in (one, two)]
    refuse(different(*batches), "the same seed gives a different batch: {}", "ace_example, args and kwargs")
    require(different(*weights[1:]), "another seed gives the same weights", "ace_example, seed")


def check_sites_are_named_for_people(kit: Kit) -> None:
    """Names of sites and stems are unique and printable, and every stem is read by another node."""
    nodes = kit.plugin.call("ace_layers", model=kit.plain())
    names = [node.name for node in nodes]
    used = {node.reads for node in nodes} | {node.through for node in nodes if isinstance(node, Site)}
    for node in nodes:
        field, clean = node_field(node, "name"), node.name.isprintable() and node.name.strip() == node.name
        require(names.count(node.name) == 1, f"{names.count(node.name)} nodes are named {node.name!r}", field)
        require(clean, f"the name {node.name!r} has spaces around it or cannot be printed", field)
        require(not isinstance(node, Stem) or node.name in used, f"nothing reads stem {node.name!r}", field)


def check_sites_fit_the_forward(kit: Kit) -> None:
    """Every site's module is called in the forward pass, with the inputs, outputs and shapes that the site declares."""
    model = kit.attached()
    seen = kit.site_outputs(model.train(), model.ace.sites)  # raises an error if inputs, outputs or shapes do not fit
    for site in model.ace.sites:
        reason = f"site {site.name!r}: {site.module} is not called in the example's forward pass"
        require(site.name in seen, reason, node_field(site, "module"))


def check_attach_moves_no_random_numbers(kit: Kit) -> None:
    """A script that sets its seed draws the same random numbers with ACE and without."""
    model = kit.plain()
    torch.manual_seed(kit.seed)
    before = torch.random.get_rng_state()
    for mode in ("off", "strict"):  # the other modes call the same hooks as strict
        attach(model, kit.plugin.name, **{**PLAIN, "frames": "auto", "mode": mode})
        unmoved = torch.equal(before, torch.random.get_rng_state())
        hooks = "random numbers drawn in ace_preset, ace_shims, ace_layers, ace_group_action or ace_script"
        require(unmoved, f"attach advances the global random stream (mode {mode})", hooks)


def check_attach_leaves_the_weights(kit: Kit) -> None:
    """Upstream's parameters and buffers stay the same objects with the same values, and none are added."""
    model = kit.plain()
    held, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    attach(model, kit.plugin.name, **PLAIN)
    after = {name: value for name, value in model.state_dict().items() if not name.startswith("ace.")}
    refuse(different(before, after), "attach changes upstream's {}", CHANGES)
    refuse([name for name in after if name not in before], "attach adds {} to upstream", ADDS)
    now = dict(model.named_parameters())
    refuse([name for name in held if now.get(name) is not held[name]], "attach replaces upstream's {}", CHANGES)


def check_attach_repeats(kit: Kit) -> None:
    """The same seed gives the same branches."""
    branches = [kit.attached().ace.branches.state_dict() for _ in range(2)]
    look_at = "ace_branch: draw from torch's global random stream"
    refuse(different(*branches), "the same seed gives different branches: {}", look_at)


def check_branches_are_their_own(kit: Kit) -> None:
    """No branch shares a parameter with upstream or with another branch."""
    model = kit.attached()
    owners = {id(p): name for name, p in model.named_parameters() if not name.startswith("ace.")}
    for name in model.ace.nodes:
        for weight, parameter in model.ace.branch(name).named_parameters():
            reason = f"the branch of {name!r} shares its {weight} with {owners.get(id(parameter))}"
            require(id(parameter) not in owners, reason, f"ace_branch, site {name!r}")
            owners[id(parameter)] = f"the branch of {name!r}"


def check_gamma_zero_is_upstream(kit: Kit) -> None:
    """With gamma = 0 the model gives upstream's output bit for bit, in train and eval mode."""
    plain, model = kit.plain(), kit.attached(gamma=0.0)
    look_at = "ace_branch: writes to its input, or values that are not finite; ace_layers: changes to the model"
    with use_branches(model, True):
        for training in (True, False):
            reason = f"gamma = 0 does not give upstream's output bit for bit (training={training})"
            _require_same(kit, plain.train(training), model.train(training), reason, look_at)


def _require_same(kit: Kit, plain: nn.Module, model: Any, reason: str, look_at: str) -> None:
    """Require that a model gives the output of plain upstream. An error names the first site with another output."""
    if not same(kit.run(plain), kit.run(model)):
        seen = (kit.site_outputs(each, model.ace.sites) for each in (plain, model))
        first = "".join(f" (first at site {name!r})" for name in different(*seen)[:1])
        raise CheckError(reason + first, look_at)


def check_eval_is_upstream(kit: Kit) -> None:
    """In modes strict and auto, ``model.eval()`` gives upstream's output, unless mode auto has kept a branch."""
    for mode in ("strict", "auto"):
        model = kit.attached(mode=mode, loop="paced")
        reason = f"{mode}: model.eval() does not give upstream's output"
        _require_same(kit, kit.plain().eval(), model.eval(), reason, CHANGES)


def check_eval_keeps_the_branches(kit: Kit) -> None:
    """In resilient mode ``model.eval()`` includes the branches, because they stay in the final model."""
    model = kit.attached(mode="resilient", spectral_norm=True, gamma_init=1.0)
    changed = not same(kit.run(kit.plain().eval()), kit.run(model.eval()))
    look_at = "ace_layers, module and output of the sites; ace_branch"
    require(changed, "resilient: model.eval() gives upstream's output: no branch has an effect", look_at)


def check_off_is_upstream(kit: Kit) -> None:
    """In mode off, training gives the same losses as upstream, and the state_dict has upstream's keys and shapes."""
    plain, off = kit.plain(), kit.plain()
    expected = kit.train(plain)  # before attach, because hooks could change upstream's class
    attach(off, kit.plugin.name, mode="off")
    losses, look_at = kit.train(off), "ace_shims and ace_preset: side effects"
    require(losses == expected, f"mode off trains with losses {losses}, upstream with {expected}", look_at)
    require(_shapes(off) == _shapes(plain), "mode off changes the keys or shapes of the state_dict", look_at)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the model's state_dict."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def check_every_site_learns(kit: Kit) -> None:
    """Every gamma gets a finite, non-zero gradient."""
    # In mode auto, only some of the samples give gamma a gradient.
    model = kit.attached(mode="strict", gamma_init=1.0)
    torch.autograd.backward(kit.loss(model.train()))
    pulls = torch.zeros_like(model.ace.gamma) if model.ace.gamma.grad is None else model.ace.gamma.grad
    gradients = list(zip(model.ace.sites, pulls.tolist(), strict=True))
    if silent := [site for site, gradient in gradients if gradient == 0]:
        called = silent[0].name in kit.site_outputs(model, model.ace.sites)
        why = "the branch has no effect on the output" if called else f"{silent[0].module} is not called"
        look_at = f"{node_field(silent[0], 'output' if called else 'module')}: correct it, or leave the site out"
        refuse([repr(site.name) for site in silent], f"gamma of {{}} gets no gradient: {why}", look_at)
    for site, gradient in gradients:
        reason = f"the gradient of gamma of {site.name!r} is {gradient}"
        require(math.isfinite(gradient), reason, f"ace_branch, site {site.name!r}")


def check_every_branch_learns(kit: Kit) -> None:
    """Every trainable parameter of every branch gets a gradient."""
    model = kit.attached(mode="strict", gamma_init=1.0)
    torch.autograd.backward(kit.loss(model.train()))
    for name in model.ace.nodes:
        parameters = model.ace.branch(name).named_parameters()
        unused = [weight for weight, p in parameters if p.requires_grad and p.grad is None]
        refuse(unused, f"{{}} in the branch of {name!r} get no gradient", f"ace_branch, site {name!r}")


def check_samples_judge_or_train(kit: Kit) -> None:
    """In mode auto, samples that judge gamma do not train the branches, and samples that train them do not judge."""
    training, judging = (_backward_in_auto(kit, holdout) for holdout in (0.0, 1.0))
    pulled = training.gamma.grad is not None and training.gamma.grad.any()
    reason = "gamma gets a gradient from samples that train the branches"
    require(not pulled, reason, "ace_branch: add_to must use the first gamma for the rows in fit")
    for name in judging.nodes:
        parameters = judging.branch(name).named_parameters()
        trained = [weight for weight, p in parameters if p.grad is not None and p.grad.any()]
        look_at = f"ace_branch, site {name!r}: add_to without fit, or fits_rows on a module that ignores it"
        refuse(trained, f"samples that judge gamma train {{}} in the branch of {name!r}", look_at)


def _backward_in_auto(kit: Kit, holdout: float) -> Any:
    """Compute gradients in mode auto, with this share of the samples judging gamma, and return ``model.ace``."""
    model = kit.attached(mode="auto", loop="paced")
    model.ace.duals.evidence.holdout = holdout
    torch.autograd.backward(kit.loss(model.train()))
    return model.ace


def check_training_moves_the_duals(kit: Kit) -> None:
    """Three optimizer steps cause three dual steps, which change gamma and lambda of every site."""
    for mode in ("strict", "bounded", "resilient"):
        model = kit.attached(mode=mode, loop="paper", dual_lr=0.01, gamma_init=1.0, spectral_norm=mode != "strict")
        kit.train(model.train())
        now = status(model)
        require(now.steps == 3, f"{mode}: {now.steps} dual steps after 3 optimizer steps", "ace_example: its model")
        for site in now.sites:
            if site.gamma == 1.0 or site.lambda_ == 0 or not math.isfinite(site.gamma + site.lambda_):
                found = f"{mode}: after 3 steps gamma of {site.name!r} is {site.gamma} and lambda {site.lambda_}"
                finite = torch.isfinite(kit.loss(model))
                require(finite, f"{found}: the loss is not finite", f"ace_branch, site {site.name!r}")
                node = node_field(model.ace.nodes[site.name], "module and output")
                raise CheckError(f"{found}: expected both to change", node)


def check_project_gives_upstream_back(kit: Kit) -> None:
    """`project` turns the model into f_eq, with upstream's state_dict keys and without ACE's hooks."""
    model = kit.trained()
    expected = kit.run(model.eval())
    project(model)
    left = sorted(_shapes(model).items() ^ _shapes(kit.plain()).items())
    refuse([name for name, _ in left], "project leaves other keys or shapes: {}", ADDS)
    require(same(expected, kit.run(model)), "project changes the output of upstream's model", CHANGES)
    hooks = [(name, hook) for name, module in model.named_modules() for hook in module._forward_hooks.values()]
    hooked = [name for name, hook in hooks if type(hook).__module__.startswith("ace_plugins.")]
    refuse(hooked, "project leaves hooks on {}", "ace_layers: modules that the model contains twice")


def check_copies_are_independent(kit: Kit) -> None:
    """`copy.deepcopy` and `pickle` give a model with the same outputs. Training it does not change the original."""
    model = kit.attached()
    ways: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy}
    with suppress(AttributeError, TypeError, pickle.PicklingError):  # models of escnn cannot be pickled without ACE
        pickle.dumps(kit.plain())
        ways["pickle"] = lambda original: pickle.loads(pickle.dumps(original))
    for how, make_copy in ways.items():
        try:
            twin = make_copy(model)
        except Exception as error:
            look_at = "ace_branch and Site.acts: define classes at module level, without lambdas"
            raise CheckError(f"a {how} of the model fails: {one_line(error)}", look_at) from error
        before = copy.deepcopy(model.state_dict())
        outputs = [kit.run(copy.deepcopy(each).train()) for each in (model, twin)]
        require(same(*outputs), f"a {how} of the model gives different outputs", STATE)
        kit.train(twin.train())
        require(status(twin).steps == 3, f"a {how} of the model trains without dual steps", STATE)
        refuse(different(before, model.state_dict()), f"training a {how} changes the original: {{}}", STATE)


def check_checkpoints_resume(kit: Kit) -> None:
    """Loading a state_dict restores gamma, lambda, the bound u and the branches."""
    model = kit.trained()
    again = kit.attached(mode="strict")
    again.load_state_dict(_save_and_load(model))
    restored = status(again) == status(model)
    require(restored, "a checkpoint does not restore gamma, lambda and u", "ace_example: the model's state_dict")
    with use_branches(model, True), use_branches(again, True):
        outputs = [kit.run(each.eval()) for each in (model, again)]
    state = "ace_branch: state that is neither a parameter nor a buffer"
    require(same(*outputs), "a resumed model gives different outputs with its branches on", state)


def check_checkpoints_export(kit: Kit) -> None:
    """Exported checkpoints load into plain upstream, and upstream's checkpoints into an attached model."""
    model = kit.trained()
    plain = kit.plain()
    try:
        plain.load_state_dict(export(_save_and_load(model)), strict=True)
    except RuntimeError as error:
        reason = f"upstream does not load an exported checkpoint: {' '.join(str(error).split())}"
        raise CheckError(reason, ADDS) from error
    expected = kit.run(plain.eval())
    require(same(expected, kit.run(model.eval())), "an exported checkpoint gives other outputs", CHANGES)
    fresh = kit.attached(mode="strict")
    fresh.load_state_dict(plain.state_dict(), strict=True)
    loads = same(kit.run(fresh.eval()), expected)
    require(loads, "an attached model loads upstream's checkpoint incorrectly", CHANGES)


def _save_and_load(model: nn.Module) -> dict[str, Tensor]:
    model.eval()  # scripts save after validation, and escnn has different buffers in training mode
    torch.save(model.state_dict(), file := io.BytesIO())
    return dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))


def check_upstream_is_symmetric(kit: Kit) -> None:
    """At gamma = 0 the example is equivariant under the action that ``ace_group_action`` returns."""
    found, dtype = _measure(kit, 0.0)
    if not found.relative < FLOOR[dtype]:
        measured = f"relative equivariance error under {found.group} is {found.relative:.3g}"
        reason = f"at gamma = 0 the {measured}, expected below {FLOOR[dtype]:g}; {_worst_output(kit)} has the largest"
        look_at = "ace_group_action: the group, the inputs (arguments without an action stay unchanged) and the outputs"
        raise CheckError(f"{reason} error", look_at)


def check_frames_leave_upstream(kit: Kit) -> None:
    """Random frames leave the model without branches unchanged: input and output are transformed consistently."""
    kit.needs_action()
    model = kit.attached(gamma=0.0, mode="strict", frames="on")
    expected, found = (model.ace.action.tensors_to_compare(kit.call(each.train())) for each in (kit.plain(), model))
    for name, tensor in expected.items():
        off, size = (float(x.detach().norm()) for x in (found[name] - tensor, tensor))
        reason = f"{name} of f_eq changes by {off:.1e} in a random frame"
        require(off <= FRAMES * (1e-30 + size), reason, f"ace_group_action: inputs and {name}")


def check_branches_break_the_symmetry(kit: Kit) -> None:
    """At gamma = 1 the example is not equivariant; otherwise the branches would not relax the symmetry."""
    found, _ = _measure(kit, 1.0)
    reason = f"at gamma = 1 the branches keep the symmetry under {found.group} (relative error {found.relative:.3g})"
    look_at = "ace_layers, reads of the sites: a branch needs an input that is not invariant; ace_branch"
    require(found.relative > BROKEN, reason, look_at)


def _measure(kit: Kit, gamma: float) -> tuple[EquivarianceError, torch.dtype]:
    """Return the equivariance error at this gamma, and its precision: float64 if upstream can compute in float64."""
    kit.needs_action()
    model = kit.attached(gamma=gamma)
    batch, not_double = kit.batch, "the example needs float32"
    if not kit.example.single:
        model, batch, not_double = convert_to_double(model, batch, copied=True)
    return equivariance_error(model, batch, branches_on=True), torch.float32 if not_double else torch.float64


def _worst_output(kit: Kit) -> str:
    """Name the output of plain upstream with the largest relative equivariance error."""
    model, call = kit.plain().eval(), (kit.batch.args, kit.batch.kwargs)
    action = kit.plugin.action(model)
    element = action.group.sample(torch.Generator().manual_seed(kit.seed))
    output = evaluate(model, *call, kit.seed)
    ((expected, found),) = compare_orders(model, action, call, output, [element], kit.seed)
    return max(expected, key=lambda name: float((found[name] - expected[name]).norm() / expected[name].norm()))


_found = {name.removeprefix("check_"): check for name, check in [*globals().items()] if name.startswith("check_")}
CHECKS: dict[str, Callable[[Kit], None]] = {name: hide_warnings()(check) for name, check in _found.items()}
"""Mapping from the name of each check to its function. A check raises `CheckError` if the adapter fails it, and
`unittest.SkipTest` if it does not apply to the adapter."""
