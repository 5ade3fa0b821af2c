"""Reads chosen molecules of QM9 from the PyPI package qm9pack, without pandas.

The package's own reader parses 230 MB through pandas. This one finds the lines by their line ends, which no field
contains, and parses only the chosen ones.
"""

from __future__ import annotations

import csv
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ace_plugins.adapter import AdapterError, ConfigError, one_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILES = tuple(f"qm9pack/data/qm9_part{part}.csv" for part in (1, 2, 3))
FEWEST = 30
INSTALL = "run pip install './adapters/schnet[demo]' in a clone of ace-plugins, or pip install qm9pack matplotlib"
NUMBERS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}


@dataclass(frozen=True)
class Target:
    """A property to predict: its column in the files, its unit and a description."""

    column: str
    unit: str
    description: str


TARGETS = {
    "mu": Target("Dipole_debye", "D", "dipole moment"),
    "alpha": Target("Polarizability_bohr3", "bohr^3", "isotropic polarizability"),
    "homo": Target("HOMO_au", "Hartree", "energy of the highest occupied orbital"),
    "lumo": Target("LUMO_au", "Hartree", "energy of the lowest unoccupied orbital"),
    "gap": Target("HOMO_LUMO_gap_au", "Hartree", "gap between HOMO and LUMO"),
    "r2": Target("R2_bohr2", "bohr^2", "electronic spatial extent"),
    "zpve": Target("ZPVE_au", "Hartree", "zero-point vibrational energy"),
    "u0": Target("InternalEnergy_0K_au", "Hartree", "internal energy at 0 K"),
    "u298": Target("InternalEnergy_298K_au", "Hartree", "internal energy at 298.15 K"),
    "h298": Target("Enthalphy_298K_au", "Hartree", "enthalpy at 298.15 K"),
    "g298": Target("GibbsFreeEnergy_298K_au", "Hartree", "free energy at 298.15 K"),
    "cv": Target("Heatcapacity_Cv_cal_mol_K", "cal/(mol K)", "heat capacity at 298.15 K"),
    "rot_a": Target("RotA_GHz", "GHz", "rotational constant A"),
    "rot_b": Target("RotB_GHz", "GHz", "rotational constant B"),
    "rot_c": Target("RotC_GHz", "GHz", "rotational constant C"),
}


@dataclass(frozen=True)
class Molecules:
    """Molecules in flat tensors, one after the other. Molecule i has ``sizes[i]`` atoms."""

    z: Tensor
    """Atomic numbers, [atoms]."""
    pos: Tensor
    """Positions in Angstrom, [atoms, 3]."""
    y: Tensor
    """Target, [molecules]. float64, since energies need more digits than float32 has."""
    sizes: Tensor
    rows: Tensor
    """Row of each molecule in QM9, counted from 0 over the three files."""
    starts: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", self.sizes.cumsum(0) - self.sizes)

    def __len__(self) -> int:
        return self.sizes.shape[0]

    def to(self, device: torch.device) -> Molecules:
        moved = (t.to(device) for t in (self.z, self.pos, self.y, self.sizes, self.rows))
        return Molecules(*moved)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (z, pos, batch, y) of these molecules, in this order. SchNet's forward takes the first three."""
        sizes = self.sizes[indices]
        batch = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        ends = sizes.cumsum(0)
        shift = self.starts[indices] - (ends - sizes)
        atoms = torch.arange(batch.shape[0], device=sizes.device) + shift[batch]
        return self.z[atoms], self.pos[atoms], batch, self.y[indices]


def load(molecules: int, target: str, seed: int) -> Molecules:
    """Draw molecules uniformly from QM9, without replacement.

    With the same seed, a smaller sample is a prefix of a larger one.
    """
    check(molecules, target)
    import numpy as np

    parts = _files()
    lines = [_lines(path) for path in parts]
    total = sum(len(starts) - 1 for starts in lines)
    if molecules > total:
        raise ConfigError(f"molecules {molecules}: expected at most {total}, the size of QM9")
    rows = np.random.default_rng(seed).permutation(total)[:molecules]
    return _read(rows, target, parts, lines)


def check(molecules: int, target: str) -> None:
    """Raise a ConfigError for settings that are invalid whatever the files contain."""
    if target not in TARGETS:
        raise ConfigError(one_of("QM9 target", target, TARGETS))
    if molecules < FEWEST:
        raise ConfigError(f"molecules {molecules}: expected at least {FEWEST}, to train, validate and test on")


def read(rows: Sequence[int], target: str) -> Molecules:
    """Read the molecules at these rows, counted from 0."""
    import numpy as np

    parts = _files()
    return _read(np.asarray(rows), target, parts, [_lines(path) for path in parts])


def _files() -> list[Path]:
    try:
        package = importlib.metadata.distribution("qm9pack")  # importing it would import pandas
        importlib.metadata.distribution("numpy")
    except importlib.metadata.PackageNotFoundError as error:
        raise AdapterError(f"QM9: expected the packages qm9pack and numpy, found no {error.name}; {INSTALL}") from None
    files = [Path(str(package.locate_file(name))) for name in FILES]
    for path in files:
        if not path.is_file():
            raise AdapterError(f"QM9: expected the file {path}, found none; run pip install --force-reinstall qm9pack")
    return files


def _lines(path: Path) -> NDArray[np.int64]:
    """Return the offsets of the lines after the header, and of the end of the file."""
    import numpy as np

    content = np.memmap(path, dtype=np.uint8, mode="r")
    return np.flatnonzero(content == ord("\n")).astype(np.int64) + 1


def _read(rows: NDArray[np.int64], target: str, parts: Sequence[Path], lines: Sequence[NDArray[np.int64]]) -> Molecules:
    import numpy as np

    ends = np.cumsum([len(starts) - 1 for starts in lines])
    if len(rows) and not 0 <= rows.min() <= rows.max() < ends[-1]:
        raise ConfigError(f"QM9 rows {rows.min()} to {rows.max()}: expected 0 to {ends[-1] - 1}")
    texts: list[str] = [""] * len(rows)
    header: list[str] = []
    for path, starts, end in zip(parts, lines, ends, strict=True):
        first = end - (len(starts) - 1)
        with path.open("rb") as file:
            header = next(csv.reader([file.readline().decode()]))
            for place in np.flatnonzero((first <= rows) & (rows < end)):
                row = rows[place] - first
                file.seek(starts[row])
                texts[place] = file.read(starts[row + 1] - starts[row]).decode()
    elements, xyz, value = (header.index(name) for name in ("Elements", "XYZ_Ang", TARGETS[target].column))
    numbers: list[int] = []
    coordinates: list[float] = []
    sizes: list[int] = []
    targets: list[float] = []
    for fields in csv.reader(texts):
        symbols = fields[elements].strip("[]").replace("'", "").split(",")
        numbers += [NUMBERS[symbol] for symbol in symbols]
        coordinates += map(float, fields[xyz].replace("[", "").replace("]", "").split(","))
        sizes.append(len(symbols))
        targets.append(float(fields[value]))
    return Molecules(
        z=torch.tensor(numbers),
        pos=torch.tensor(coordinates).reshape(-1, 3),
        y=torch.tensor(targets, dtype=torch.float64),
        sizes=torch.tensor(sizes),
        rows=torch.from_numpy(np.array(rows, dtype=np.int64)),
    )
