"""The symmetry: upstream has it, random frames leave it, and the branches break it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...contract.upstreams import Example
from ...engine.measuring import equivariance_error
from ...symmetry.actions import GroupAction
from ...symmetry.measuring import Call, EquivarianceError, evaluate, forward_names
from ..kit import CheckError, Kit

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
