"""Convert acetylacetone (BOTNet-datasets) to numpy arrays for torchmd-train's data set Custom.

    python experiments/acac_torchmdnet.py          # in the folder of train_300K.xyz and test_MD_300K.xyz

Writes coordinates, atomic numbers, energies and forces of all structures (``acac_*.npy``, in Angstrom and eV) and the
indices for training, validation and testing (``acac_splits.npz``). Energies are relative to the mean of the training
set: single precision could not resolve their differences next to a mean of 9,391 eV.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

NUMBERS = {"H": 1, "C": 6, "O": 8}
VALIDATION = 50


def read_structures(path: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the species, the energies [n], and position and force of every atom [n, atoms, 6]."""
    lines = path.read_text(encoding="utf-8").splitlines()
    atoms = int(lines[0])
    frames = [lines[begin : begin + atoms + 2] for begin in range(0, len(lines), atoms + 2)]
    energies = [float(re.findall(r"\benergy=(\S+)", frame[1])[0]) for frame in frames]
    words = [[line.split() for line in frame[2:]] for frame in frames]
    species = [word[0] for word in words[0]]
    assert all([word[0] for word in frame] == species for frame in words), (
        f"{path}: expected structures of one molecule"
    )
    return species, np.array(energies), np.array([[word[1:7] for word in frame] for frame in words], dtype=float)


def main() -> None:
    species, energies, rows = read_structures(Path("train_300K.xyz"))
    _, test_energies, test_rows = read_structures(Path("test_MD_300K.xyz"))
    order = np.random.default_rng(1).permutation(len(rows))
    train, validation = order[VALIDATION:], order[:VALIDATION]
    both = np.concatenate([rows, test_rows]).astype(np.float32)
    energies_from_mean = np.concatenate([energies, test_energies]) - energies[train].mean()
    np.save("acac_coordinates.npy", both[..., :3])
    np.save("acac_forces.npy", both[..., 3:])
    np.save("acac_energies.npy", energies_from_mean[:, None].astype(np.float32))
    np.save("acac_numbers.npy", np.array([NUMBERS[kind] for kind in species]))
    test = np.arange(len(rows), len(both))
    np.savez("acac_splits.npz", idx_train=train, idx_val=validation, idx_test=test)
    print(f"{len(train)} to train on, {len(validation)} to validate on, {len(test)} to test on")


if __name__ == "__main__":
    main()
