"""What outlives a training step: copies, checkpoints, and upstream itself when ACE is taken off."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import torch

from ...engine.attaching import project
from ...engine.checkpoints import export
from ...engine.measuring import use_branches
from ...report.status import status
from ..kit import CheckError, Kit, different, layout, same


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
