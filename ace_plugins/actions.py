"""The public home of groups and actions: what an adapter's ``ace_group_action`` is made of."""

from .symmetry.actions import (
    Action,
    Grid,
    GroupAction,
    Invariant,
    Irreps,
    Positions,
    PseudoVectors,
    Tensors,
    Vectors,
)
from .symmetry.finite import Cyclic, Dihedral
from .symmetry.graphs import Graphs
from .symmetry.groups import E2, E3, O2, O3, SE2, SE3, SO2, SO3, Element, Group, Rigid

__all__ = [
    "E2",
    "E3",
    "O2",
    "O3",
    "SE2",
    "SE3",
    "SO2",
    "SO3",
    "Action",
    "Cyclic",
    "Dihedral",
    "Element",
    "Graphs",
    "Grid",
    "Group",
    "GroupAction",
    "Invariant",
    "Irreps",
    "Positions",
    "PseudoVectors",
    "Rigid",
    "Tensors",
    "Vectors",
]
