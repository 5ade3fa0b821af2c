"""Random frames: a training forward sees its batch under a random group element, and answers in the original frame.

For f_eq nothing changes, to rounding. For the branches it is data augmentation that needs neither the script, nor its
targets, nor its loss: they learn to be equivariant on average instead of memorising orientations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..symmetry.actions import GroupAction
from ..symmetry.groups import Element
from ..symmetry.measuring import forward_names
from .compiling import outside_graphs
from .distributed import rank
from .state import NAME, Ace

# Random numbers of its own, and matrices that compilers would take for constants.
WHOLE = "for fullgraph=True: set frames = 'off'; random frames are no part of a graph"


@outside_graphs(WHOLE)
def turned(model: nn.Module, ace: Ace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a training forward in a random frame, which is kept for `TurnBackHook`."""
    assert ace.action is not None
    # Each process has frames of its own.
    generator = torch.Generator().manual_seed(ace.turns.seed(ace.duals.count, rank()))
    names = forward_names(model)
    ace.turns.frame = ace.action.frame(generator, names, args, kwargs)
    return ace.action.act_on_inputs(ace.turns.frame, names, args, kwargs)


@dataclass(eq=False)
class TurnBackHook:
    """Forward hook of the model, the last: its outputs as the caller's frame has them."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        frame, ace.turns.frame = ace.turns.frame, None
        return None if frame is None else _turned_back(ace.action, frame, output)


@outside_graphs(WHOLE)
def _turned_back(action: Any, frame: Element, output: Any) -> Any:
    return action.act_on_outputs(frame.inverse(), output)


class Averaged(nn.Module):
    """A model whose output is the mean over random frames: closer to equivariant, at the cost of so many forwards."""

    def __init__(self, model: nn.Module, action: GroupAction, samples: int, seed: int) -> None:
        super().__init__()
        self.model = model
        self.action = action
        self.samples = samples
        self.seed = seed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = forward_names(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        outputs = []
        for _ in range(self.samples):
            element = self.action.group.sample(generator, scale=0.0)
            turned = self.action.act_on_inputs(element, names, args, kwargs)
            outputs.append(self.action.act_on_outputs(element.inverse(), self.model(*turned[0], **turned[1])))
        return self.action.mean(outputs)
