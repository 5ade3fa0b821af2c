"""A small NequIP, and a batch of two random molecules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ace_plugins.adapter import Example

TYPES = ("H", "C", "O")
CUTOFF = 4.0


def molecules_example(seed: int, **options: Any) -> Example:
    """Return a small model and two random molecules."""
    made = torch.Generator().manual_seed(seed)
    return Example(small(seed, **options), (batch(made),))


def small(seed: int = 0, **options: Any) -> Any:
    """Build a model in float64 with two layers, l_max = 1 and 8 features of each kind."""
    with _own_state():
        from nequip.model import NequIPGNNModel
        from nequip.utils.global_state import set_global_state

        set_global_state()
        settings: dict[str, Any] = {
            "seed": seed,
            "model_dtype": "float64",
            "type_names": list(TYPES),
            "r_max": CUTOFF,
            "num_layers": 2,
            "l_max": 1,
            "num_features": 8,
            "radial_mlp_depth": 1,
            "radial_mlp_width": 16,
            "avg_num_neighbors": 5.0,
            "per_type_energy_scales": 1.0,
            "per_type_energy_shifts": 0.0,
        }
        return NequIPGNNModel(**{**settings, **options})


def batch(
    made: torch.Generator, *, periodic: bool = False, molecules: int = 2, atoms: int = 6, within: float = 4.0
) -> dict[str, Tensor]:
    """Draw random molecules, in cells if ``periodic``, in the format of nequip's data loader.

    Atoms are drawn from a cube of side ``within`` and pushed apart. Cells are longer than twice the cutoff, so that
    only the nearest image of an atom can be a neighbour.
    """
    graph = torch.arange(molecules).repeat_interleave(atoms)
    pos = _apart(torch.rand(molecules, atoms, 3, generator=made, dtype=torch.float64) * within).flatten(0, 1)
    data = {
        "pos": pos,
        "atom_types": torch.randint(len(TYPES), (len(pos),), generator=made),
        "batch": graph,
        "num_atoms": torch.full((molecules,), atoms),
    }
    between = pos[None] - pos[:, None]
    shift = torch.zeros_like(between)
    if periodic:
        skew = torch.rand(molecules, 3, 3, generator=made, dtype=torch.float64) - 0.5
        data["cell"] = (2.5 * CUTOFF) * torch.eye(3, dtype=torch.float64) + skew
        cells = data["cell"][graph][:, None]
        shift = -torch.linalg.solve(cells.mT, between[..., None])[..., 0].round()
        between = between + (shift[..., None, :] @ cells)[..., 0, :]
    near = (between.norm(dim=-1) < CUTOFF) & (graph[:, None] == graph[None])
    near.fill_diagonal_(False)
    data["edge_index"] = near.nonzero().T.contiguous()
    if periodic:
        data["edge_cell_shift"] = shift[near]
    return data


def _apart(pos: Tensor, least: float = 0.9) -> Tensor:
    """Push the atoms of molecules [m, atoms, 3] apart until their distances are at least ``least``."""
    for _ in range(200):
        between = pos[:, :, None] - pos[:, None]
        length = between.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        pos = pos + (between / length * (least - length).clamp_min(0) / 2).sum(2)
    return pos


@contextmanager
def _own_state() -> Iterator[None]:
    """Restore the default dtype and the random states after the block, because building a nequip model changes them."""
    kinds = torch.get_default_dtype(), random.getstate()
    numpy: Any = __import__("numpy")
    drawn = numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_default_dtype(kinds[0])
            random.setstate(kinds[1])
            numpy.random.set_state(drawn)
