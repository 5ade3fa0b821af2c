"""Convert acetylacetone (BOTNet-datasets) to the format of SchNetPack: acac.db and split.npz.

    python experiments/acac_schnetpack.py FOLDER

FOLDER contains train_300K.xyz and test_MD_300K.xyz; the output is written there. Of the first file, 450 random
structures are for training and 50 for validation. All of the second file is for testing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
from ase.io import read

from ace_plugins import patched


def main(folder: Path) -> None:
    patched("schnetpack", mode="off").undo()  # applies the shims that SchNetPack needs with current versions of torch
    from schnetpack.data import ASEAtomsData

    train, test = (read(folder / name, ":") for name in ("train_300K.xyz", "test_MD_300K.xyz"))
    target = folder / "acac.db"
    target.unlink(missing_ok=True)
    units = {"energy": "eV", "forces": "eV/Ang"}
    database = ASEAtomsData.create(str(target), distance_unit="Ang", property_unit_dict=units)
    labels = [{"energy": numpy.array([f.get_potential_energy()]), "forces": f.get_forces()} for f in (*train, *test)]
    database.add_systems(labels, [*train, *test])
    order = numpy.random.default_rng(1).permutation(len(train))
    parts = {"train_idx": order[:450], "val_idx": order[450:], "test_idx": len(train) + numpy.arange(len(test))}
    numpy.savez(folder / "split.npz", **parts)
    print(f"{target}: {', '.join(f'{len(part)} to {name[:-4]}' for name, part in parts.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
