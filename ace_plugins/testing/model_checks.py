"""What attaching leaves alone: the random stream, upstream's weights, and upstream itself where gamma is 0.

What outlives a training step: copies, checkpoints, and upstream itself when ACE is taken off.

The symmetry: upstream has it, random frames leave it, and the branches break it.

What training does: every gamma and every branch learns, and the duals move.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor

from ..contract.upstreams import Example
from ..engine.attach import project
from ..engine.checkpoint import export
from ..engine.measure import equivariance_error, use_branches
from ..engine.state import Ace
from ..errors import AceWarning
from ..patch.constructors import attach
from ..report.status import status
from ..symmetry.actions import GroupAction
from ..symmetry.measure import Call, EquivarianceError, evaluate, forward_names
from .kit import CheckError, Kit, different, differing_site, layout, node_field, outputs_of, same


def check_attach_moves_no_random_numbers(kit: Kit) -> None:
    """A script that sets its seed draws the same numbers with ACE and without."""
    example = kit.example()
    torch.manual_seed(kit.seed)
    for mode in ("off", "strict"):
        before = torch.random.get_rng_state()
        attach(example.model, kit.plugin.name, trace=False, tell=False, mode=mode)
        if not torch.equal(before, torch.random.get_rng_state()):
            raise CheckError(
                f"attach moves the random stream (mode {mode})",
                "whatever draws random numbers in ace_preset, ace_shims, ace_layers, ace_group_action or ace_script",
            )


def check_attach_leaves_the_weights(kit: Kit) -> None:
    """Upstream's parameters and buffers are the same objects with the same values, and it has no others."""
    example = kit.example()
    held = {name: id(parameter) for name, parameter in example.model.named_parameters()}
    before = copy.deepcopy(example.model.state_dict())
    attach(example.model, kit.plugin.name, trace=False, tell=False)
    after = {name: value for name, value in example.model.state_dict().items() if not name.startswith("ace.")}
    changed = different(before, after)
    if changed:
        raise CheckError(f"attach changes upstream's {', '.join(changed[:3])}", "ace_layers and ace_branch")
    new = [name for name in after if name not in before]
    if new:
        raise CheckError(f"attach adds {', '.join(new[:3])} to upstream", "ace_branch: return the module, no more")
    now = {name: id(parameter) for name, parameter in example.model.named_parameters()}
    replaced = [name for name, which in held.items() if now.get(name) != which]
    if replaced:
        raise CheckError(f"attach replaces upstream's {', '.join(replaced[:3])}", "ace_layers and ace_branch")


def check_attach_repeats(kit: Kit) -> None:
    """The same seed gives the same branches."""
    one, two = (kit.attached()[0] for _ in range(2))
    others = different(one.ace.branches.state_dict(), two.ace.branches.state_dict())
    if others:
        raise CheckError(
            f"the same seed gives other branches: {', '.join(others[:3])}",
            "ace_branch: draw from torch's own random stream",
        )


def check_branches_are_their_own(kit: Kit) -> None:
    """No branch holds a parameter of upstream or of another branch: each gamma is to scale one thing."""
    model, _ = kit.attached()
    upstream = {id(p): name for name, p in model.named_parameters() if not name.startswith("ace.")}
    seen: dict[int, str] = {}
    for node in model.ace.nodes.values():
        for name, parameter in model.ace.branch(node.name).named_parameters():
            owner = upstream.get(id(parameter)) or seen.get(id(parameter))
            if owner is not None:
                raise CheckError(
                    f"the branch of {node.name!r} holds {owner} as its {name}", f"ace_branch, site {node.name!r}"
                )
            seen[id(parameter)] = f"the branch of {node.name!r}"


def check_gamma_zero_is_upstream(kit: Kit) -> None:
    """With gamma = 0 the model is upstream bit for bit, in training and in evaluation."""
    plain = kit.example()
    model, example = kit.attached()
    with torch.no_grad():
        model.ace.gamma.zero_()
    for training in (True, False):
        sides = (plain.model.train(training), plain), (model.train(training), example)
        with use_branches(model, True):
            outputs = [kit.run(*side) for side in sides]
            if not same(*outputs):
                where = differing_site(kit, model.ace.sites, *sides)
                raise CheckError(
                    f"gamma = 0 does not give upstream's output bit for bit (training={training}){where}",
                    "ace_branch: a branch that writes into what it reads, or gives values that are not finite; "
                    "ace_layers: changes to the model",
                )


def check_eval_is_upstream(kit: Kit) -> None:
    """Strict mode: the script's own validation sees f_eq."""
    plain = kit.example()
    model, example = kit.attached(mode="strict")
    sides = (plain.model.eval(), plain), (model.eval(), example)
    if not same(*(kit.run(*side) for side in sides)):
        where = differing_site(kit, model.ace.sites, *sides)
        raise CheckError(
            f"strict: model.eval() does not give upstream's output{where}",
            "ace_layers and ace_branch: what they change in the model",
        )


def check_eval_keeps_the_branches(kit: Kit) -> None:
    """Resilient mode: the branches are part of what is deployed, and so of the validation."""
    plain = kit.example()
    model, example = kit.attached(mode="resilient", spectral_norm=True, gamma_init=1.0)
    if same(kit.run(plain.model.eval(), plain), kit.run(model.eval(), example)):
        raise CheckError(
            "resilient: model.eval() is upstream's output: no branch has an effect",
            "ace_layers, module and output of the sites; ace_branch",
        )


def check_off_is_upstream(kit: Kit) -> None:
    """Mode off: the same losses, keys and shapes."""
    plain, off = kit.example(), kit.example()
    torch.manual_seed(kit.seed)
    expected = kit.train(plain.model, plain)
    torch.manual_seed(kit.seed)
    attach(off.model, kit.plugin.name, mode="off")
    losses = kit.train(off.model, off)
    if losses != expected:
        raise CheckError(
            f"mode off trains with losses {losses}, upstream with {expected}", "ace_shims and ace_preset: what they do"
        )
    if layout(off.model.state_dict()) != layout(plain.model.state_dict()):
        raise CheckError("mode off changes the keys or shapes of the state_dict", "ace_shims")


def check_project_gives_upstream_back(kit: Kit) -> None:
    """`project` leaves f_eq, with upstream's own keys and without hooks of ours."""
    plain = kit.example()
    model, example = kit.attached(mode="strict")
    kit.train(model.train(), example)
    expected = kit.run(model.eval(), example)
    project(model)
    left = sorted(layout(model.state_dict()).items() ^ layout(plain.model.state_dict()).items())
    if left:
        raise CheckError(f"project leaves other keys or shapes: {left[0][0]}", "ace_branch: what it adds to the model")
    if not same(expected, kit.run(model, example)):
        raise CheckError("project changes f_eq", "ace_layers and ace_branch: what they change in the model")
    ours = [n for n, m in model.named_modules() for h in m._forward_hooks.values() if _is_ours(h)]
    if ours:
        raise CheckError(
            f"project leaves hooks on {', '.join(ours)}", "ace_layers: modules that are in the model twice"
        )


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith("ace_plugins.")


def check_copies_are_independent(kit: Kit) -> None:
    """`copy.deepcopy` and `pickle` give a model that computes the same and trains on its own."""
    model, example = kit.attached()
    for how in ("deepcopy", *(("pickle",) if _pickles(kit.example().model) else ())):
        try:
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        except Exception as error:
            raise CheckError(
                f"a {how} of the model fails: {type(error).__name__}: {' '.join(str(error).split())}",
                "ace_branch: define branches at module level, without lambdas; site.acts likewise",
            ) from error
        before = copy.deepcopy(model.state_dict())
        sides = (copy.deepcopy(model).train(), example), (copy.deepcopy(twin).train(), example)
        if not same(*(kit.run(*side) for side in sides)):
            raise CheckError(f"a {how} of the model gives other outputs", "ace_branch: what a branch holds on to")
        kit.train(twin.train(), example)
        if status(twin).steps != 3:
            raise CheckError(f"a {how} of the model trains without its duals", "ace_branch: what a branch holds on to")
        changed = different(before, model.state_dict())
        if changed:
            raise CheckError(
                f"training a {how} changes the original: {', '.join(changed[:3])}", "ace_branch: what it holds on to"
            )


def _pickles(model: torch.nn.Module) -> bool:
    """Some upstreams cannot be pickled themselves (escnn): that is not asked of them with ACE."""
    try:
        pickle.dumps(model)
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True


def check_checkpoints_resume(kit: Kit) -> None:
    """A state_dict carries gamma, lambda, u and the branches whole."""
    model, example = kit.attached(mode="strict")
    kit.train(model.train(), example)
    again, _ = kit.attached(mode="strict")
    again.load_state_dict(_saved(model))
    if status(again) != status(model):
        raise CheckError("gamma, lambda or u are lost in a checkpoint", "ace_example: its model's state_dict")
    with use_branches(model, True), use_branches(again, True):
        one, two = (kit.run(each.eval(), example) for each in (model, again))
    if not same(one, two):
        raise CheckError(
            "a resumed model computes something else with its branches on",
            "ace_branch: state that is no parameter and no buffer, so that no checkpoint has it",
        )


def check_checkpoints_export(kit: Kit) -> None:
    """Without ACE's own entries a checkpoint is plain upstream's, and plain upstream's loads into an attached model."""
    model, example = kit.attached(mode="strict")
    kit.train(model.train(), example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = kit.example().model
        try:
            plain.load_state_dict(export(_saved(model)), strict=True)
        except RuntimeError as error:
            told = " ".join(str(error).split())
            raise CheckError(
                f"upstream does not load an exported checkpoint: {told}", "ace_branch: what it adds to the model"
            ) from error
        if not same(kit.run(plain.eval(), example), kit.run(model.eval(), example)):
            raise CheckError("an exported checkpoint is not f_eq", "ace_layers and ace_branch: what they change")
        fresh, _ = kit.attached(mode="strict")
        fresh.load_state_dict(plain.state_dict(), strict=True)
    if not same(kit.run(fresh.eval(), example), kit.run(plain.eval(), example)):
        raise CheckError("a plain checkpoint loads wrong", "ace_layers and ace_branch: what they change in the model")


def _saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict, after a way through a file."""
    model.eval()  # as after validation: some upstreams have other buffers in training (escnn)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return state


SYMMETRIC = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative equivariance error of plain upstream."""
FRAMES = 1e-3
"""How far f_eq may be from itself in another frame, relative: the tolerance of float32."""
BROKEN = 1e-6
"""Smallest relative equivariance error that counts as broken, at gamma = 1."""


def check_upstream_is_symmetric(kit: Kit) -> None:
    """At gamma = 0 the example is equivariant as ``ace_group_action`` says, in double precision where it can be."""
    kit.needs("ace_group_action")
    dtype = _precision(kit)
    found = measured(kit, 0.0, dtype)
    kit.notes[f"relative equivariance error under {found.group} at gamma = 0:"] = f"{found.relative:.1e}"
    if not found.relative < SYMMETRIC[dtype]:
        output = _worst_output(kit)
        raise CheckError(
            f"at gamma = 0 the relative equivariance error under {found.group} is {found.relative:.3g}, expected below "
            f"{SYMMETRIC[dtype]:g}; {output} moves the most",
            "ace_group_action: the group, inputs (what is not mentioned stays as it is) and outputs",
        )


def check_branches_break_the_symmetry(kit: Kit) -> None:
    """At gamma = 1 it is not: else the branches relax nothing, and there is nothing to constrain."""
    kit.needs("ace_group_action")
    found = measured(kit, 1.0, _precision(kit))
    kit.notes["at gamma = 1:"] = f"{found.relative:.1e}"
    if not found.relative > BROKEN:
        raise CheckError(
            f"at gamma = 1 the branches keep the symmetry under {found.group} (relative error {found.relative:.3g}), "
            "so they relax nothing",
            "ace_layers, reads of the sites: what a branch reads must not be invariant; ace_branch",
        )


def check_frames_leave_upstream(kit: Kit) -> None:
    """In a random frame, and turned back, f_eq is what it is."""
    kit.needs("ace_group_action")
    plain = kit.example()
    model, example = kit.attached(mode="strict", frames="on")
    with torch.no_grad():
        model.ace.gamma.zero_()
    action: GroupAction = model.ace.action
    expected, found = (
        {name: tensor.detach() for name, tensor in action.compared(kit.call(side.train(), of)).items()}
        for side, of in ((plain.model, plain), (model, example))
    )
    for name, tensor in expected.items():
        off = float((found[name] - tensor).norm())
        if not off <= FRAMES * (1e-30 + float(tensor.norm())):
            raise CheckError(
                f"{name} of f_eq differs by {off:.1e} in a random frame", f"ace_group_action: inputs, and the {name}"
            )


def measured(kit: Kit, gamma: float, dtype: torch.dtype) -> EquivarianceError:
    """The equivariance error of the example with its branches on, at this gamma."""
    model, example = kit.attached()
    model.to(dtype)
    with torch.no_grad():
        model.ace.gamma.fill_(gamma)
    return equivariance_error(model, _as(dtype, example), branches_on=True)


def _worst_output(kit: Kit) -> str:
    """The output of plain upstream that is furthest from what the action says, relative to its size."""
    example = kit.example()
    action = kit.plugin.action(example.model)
    element = action.group.sample(torch.Generator().manual_seed(kit.seed))
    model, kwargs = example.model.eval(), dict(example.kwargs)
    output = evaluate(model, example.args, kwargs, kit.seed)
    turned = action.act_on_inputs(element, forward_names(model), example.args, kwargs)
    expected = action.compared(action.act_on_outputs(element, output))
    found = action.compared(evaluate(model, *turned, kit.seed))
    return max(expected, key=lambda name: float((found[name] - expected[name]).norm() / expected[name].norm()))


def _precision(kit: Kit) -> torch.dtype:
    """Double where upstream can: some compute parts in single precision whatever they are given."""
    example = kit.example()
    if example.single:
        return torch.float32
    call = _as(torch.float64, example)
    try:
        example.model.double()(*call.args, **call.kwargs)
    except RuntimeError:
        return torch.float32
    return torch.float64


def _as(dtype: torch.dtype, example: Example) -> Call:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {name: cast(part) for name, part in value.items()}
        # A PyG Data object maps a function over its tensors.
        return copy.copy(value).apply(cast) if hasattr(value, "apply") else value

    return Call(tuple(map(cast, example.args)), {name: cast(value) for name, value in example.kwargs.items()})


def check_every_site_learns(kit: Kit) -> None:
    """The output depends on every gamma."""
    model, example = kit.attached(gamma_init=1.0)
    ace: Ace = model.ace
    with outputs_of(model.train(), ace.sites) as seen:
        kit.loss(model, example).backward()  # type: ignore[no-untyped-call]
    gradients = [0.0] * len(ace.sites) if ace.gamma.grad is None else ace.gamma.grad.tolist()
    silent = [site for site, gradient in zip(ace.sites, gradients, strict=True) if gradient == 0]
    if silent:
        names = ", ".join(repr(site.name) for site in silent)
        called = silent[0].name in seen
        raise CheckError(
            f"gamma of {names} gets no gradient: "
            + ("its branch has no effect on the output" if called else f"{silent[0].module} is not called"),
            node_field(silent[0], "output" if called else "module"),
        )
    odd = [site.name for site, gradient in zip(ace.sites, gradients, strict=True) if gradient != gradient]
    if odd:
        raise CheckError(f"gamma of {odd[0]!r} gets a gradient that is not a number", f"ace_branch, site {odd[0]!r}")


def check_every_branch_learns(kit: Kit) -> None:
    """Every parameter of every branch gets a gradient."""
    model, example = kit.attached(gamma_init=1.0)
    kit.loss(model.train(), example).backward()  # type: ignore[no-untyped-call]
    for node in model.ace.nodes.values():
        branch = model.ace.branch(node.name)
        lonely = [name for name, p in branch.named_parameters() if p.requires_grad and p.grad is None]
        if lonely:
            raise CheckError(
                f"{', '.join(lonely)} in the branch of {node.name!r} get no gradient", f"ace_branch, site {node.name!r}"
            )


def check_training_moves_the_duals(kit: Kit) -> None:
    """Three optimizer steps are three dual steps, and gamma and lambda of every site move and stay finite."""
    for mode in ("strict", "bounded", "resilient"):
        settings = {"loop": "paper", "dual_lr": 0.01, "gamma_init": 1.0, "spectral_norm": mode != "strict"}
        model, example = kit.attached(mode=mode, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)  # of steps that were left out, which is told below
            kit.train(model.train(), example)
        now = status(model)
        if now.steps != 3:
            raise CheckError(f"{mode}: {now.steps} dual steps after 3 optimizer steps", "ace_example: its model")
        for site in now.sites:
            if site.gamma == 1.0 or site.lambda_ == 0 or not math.isfinite(site.gamma + site.lambda_):
                told = f"{mode}: after 3 steps gamma of {site.name!r} is {site.gamma} and lambda {site.lambda_}"
                if not torch.isfinite(kit.loss(model, example)):
                    raise CheckError(f"{told}: the loss is not finite", f"ace_branch, site {site.name!r}")
                raise CheckError(f"{told}: they did not move", node_field(site.name, "module and output"))
