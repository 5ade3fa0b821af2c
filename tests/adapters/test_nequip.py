"""The NequIP adapter on the real nequip: forces in every mode, and its commands from training to deployment."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nequip", reason="needs nequip: pip install nequip")

from ace_nequip.action import group_action
from ace_nequip.command import METRICS, script
from ace_nequip.example import batch, molecules_example, small
from ace_plugins import AceError, AceWarning, attach, audit, averaged, equivariance_error, export, use_branches
from ace_plugins.adapter import E3
from ace_plugins.testing import parametrize_with_checks

MODES = ("strict", "resilient", "bounded", "scheduled")
Data = dict[str, Tensor]
Model = Callable[[Data], Data]


@parametrize_with_checks("nequip")
def test_contract(check: Any) -> None:
    check()


def data(periodic: bool = False, seed: int = 0) -> Data:
    return batch(torch.Generator().manual_seed(seed), periodic=periodic)


def relaxed(mode: str = "strict", gamma: float = 1.0, **settings: Any) -> Any:
    """Return a model in float64 and eval mode, with all gammas equal."""
    torch.manual_seed(0)
    bounded = mode in ("resilient", "bounded")
    quiet = {"trace": False, "tell": False, "spectral_norm": bounded}
    model = attach(small(num_layers=3), mode=mode, **{**quiet, **settings}).eval()
    with torch.no_grad():
        model.ace.gamma.fill_(gamma)
    return model


# Where ACE goes in.


def test_sites_are_the_convolutions_and_none_reads_scalars_alone() -> None:
    ace = relaxed().ace
    assert [site.name for site in ace.sites] == ["layer0", "layer1", "layer2"]
    read = [site.reads.module.rpartition(".")[2] for site in ace.sites]
    assert read == ["linear_2", "linear_2", "linear_1"], "the messages of the last convolution are scalars"
    for site in ace.sites:
        assert site.module.endswith("conv.linear_2")
        assert "1o" in site.acts[0].irreps


def test_one_layer_has_nothing_to_relax() -> None:
    with pytest.raises(AceError, match="'nequip'.*GraphModel"):
        attach(small(num_layers=1))


def test_models_that_torch_compile_traces_are_refused() -> None:
    model = small(compile_mode="compile")
    with pytest.raises(AceError, match="compile_mode.*eager"):
        attach(model)


# Energies and forces.


def energy(model: Model, atoms: Data) -> Tensor:
    return model(copy.copy(atoms))["total_energy"].sum()


def as_differentiated(model: Model, atoms: Data, step: float = 1e-4) -> Tensor:
    """Return minus the gradient of the energy by central differences."""
    found = torch.zeros_like(atoms["pos"])
    for place in range(found.numel()):
        shift = torch.zeros_like(found).view(-1)
        shift[place] = step
        ends = [energy(model, {**atoms, "pos": atoms["pos"] + sign * shift.view_as(found)}) for sign in (1, -1)]
        found.view(-1)[place] = -float((ends[0] - ends[1]).detach()) / (2 * step)
    return found


def exported(model: Any) -> Any:
    plain = small(num_layers=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.load_state_dict(export(model.state_dict()), strict=True)
    return plain.eval()


@pytest.mark.parametrize("form", ["attached", "exported", "averaged"])
@pytest.mark.parametrize("mode", MODES)
def test_forces_are_minus_the_gradient_of_the_energy(mode: str, form: str) -> None:
    model = relaxed(mode)
    atoms = data()
    made = {"attached": lambda: model, "exported": lambda: exported(model), "averaged": lambda: averaged(model, 3)}
    judged = made[form]()
    with use_branches(model, True):
        forces = judged(copy.copy(atoms))["forces"]
        assert float(forces.abs().max()) > 1e-2
        torch.testing.assert_close(forces, as_differentiated(judged, atoms), rtol=1e-6, atol=1e-6)
        net = torch.zeros(2, 3, dtype=forces.dtype).index_add(0, atoms["batch"], forces)
        assert float(net.abs().max()) < 1e-12, "the net force on a molecule"


def test_forces_of_a_training_step_in_random_frames_are_those_of_its_energy() -> None:
    """Each forward pass has another random frame, so compare with autograd within one pass."""
    model = relaxed("strict", frames="on").train()
    atoms = data()
    atoms["pos"].requires_grad_(True)
    output = model(copy.copy(atoms))
    (gradient,) = torch.autograd.grad(output["total_energy"].sum(), atoms["pos"])
    torch.testing.assert_close(output["forces"], -gradient, rtol=1e-10, atol=1e-10)
    assert equivariance_error(model, (data(),), branches_on=True).relative > 1e-3


@pytest.mark.parametrize("periodic", [False, True], ids=["molecules", "cells"])
@pytest.mark.parametrize("mode", MODES)
def test_at_gamma_zero_energies_are_invariant_and_forces_turn(mode: str, periodic: bool) -> None:
    atoms, model = data(periodic), relaxed(mode, gamma=0.0)
    action, moved = group_action(model), E3.sample(torch.Generator().manual_seed(1))
    (turned,), _ = action.act_on_inputs(moved, ["data"], (atoms,), {})
    with use_branches(model, True):
        expected = action.act_on_outputs(moved, model(copy.copy(atoms)))
        found = model(turned)
    assert action.tensors_to_compare(found).keys() == {"output.forces", "output.stress", "output.virial"}
    assert expected["stress"].numel() == (18 if periodic else 0)
    for name in ("total_energy", "atomic_energy", "forces", "stress", "virial"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    assert equivariance_error(model, (atoms,), branches_on=True).relative < 1e-9
    assert equivariance_error(relaxed(mode), (atoms,), branches_on=True).relative > 1e-5


@pytest.mark.parametrize("periodic", [False, True], ids=["molecules", "cells"])
def test_translations_change_nothing_with_branches(periodic: bool) -> None:
    model, atoms = relaxed(), data(periodic)
    moved = {**atoms, "pos": atoms["pos"] + torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)}
    with use_branches(model, True):
        here, there = model(copy.copy(atoms)), model(moved)
    for name in ("total_energy", "forces", "virial"):
        torch.testing.assert_close(here[name], there[name], rtol=1e-10, atol=1e-10)


def test_an_atom_alone_keeps_its_energy() -> None:
    model = relaxed()
    one = {
        "pos": torch.zeros(1, 3, dtype=torch.float64),
        "atom_types": torch.tensor([1]),
        "edge_index": torch.zeros(2, 0, dtype=torch.long),
    }
    with use_branches(model, True):
        with_branches = model(copy.copy(one))["total_energy"]
    assert torch.equal(with_branches, exported(model)(one)["total_energy"])


def test_audit_of_a_periodic_model_finds_where_the_symmetry_ends() -> None:
    model, atoms = relaxed("resilient"), data(periodic=True)
    found = audit(model, (atoms,), samples=4)
    assert not found.uncovered, "every input has an action: positions, cell and shifts"
    assert found.error.relative > 1e-3
    begins = [layer.name for layer in found.layers if layer.begins]
    assert any("layer0_convnet.conv" in name for name in begins)
    with use_branches(model, False):
        assert audit(model, (atoms,), samples=4).error.relative < 1e-9


# What nequip-train says.


def test_results_are_read_off_lightnings_table() -> None:
    table = (
        "│        test0_epoch/forces_mae         │          0.2291300275984302          │\n"
        "│    test0_epoch/per_atom_energy_mae    │         1.051053932246357e-05        │\n"
        "    test0_epoch/forces_rmse         nan\n"
    )
    found = {metric.name: re.findall(metric.pattern, table) for metric in METRICS}
    assert found["forces mae"] == ["0.2291300275984302"]
    assert found["per atom energy mae"] == ["1.051053932246357e-05"]
    assert found["forces rmse"] == ["nan"]
    told = script(("/usr/bin/nequip-train", "-cn", "x.yaml"))
    assert told is not None
    assert (told.epochs, told.metrics) == (None, METRICS)
    assert script(("nequip-package", "build")) is None


# nequip's own commands, from data to deployment.

CONFIG = """
run: [train, test]
hydra: {{run: {{dir: {out}}}}}
data:
  _target_: nequip.data.datamodule.ASEDataModule
  seed: 1
  split_dataset: {{file_path: {folder}/data.xyz, train: 12, val: 4, test: 4}}
  transforms:
    - _target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper
      model_type_names: [H, C, O]
      chemical_species_to_atom_type_map: {{H: H, C: C, O: O}}
    - {{_target_: nequip.data.transforms.NeighborListTransform, r_max: 4.0}}
  train_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 4, shuffle: true}}
  val_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 4}}
  test_dataloader: {{_target_: torch.utils.data.DataLoader, batch_size: 4}}
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  max_epochs: 5
  enable_progress_bar: false
  enable_model_summary: false
  logger: false
  callbacks:
    - _target_: lightning.pytorch.callbacks.ModelCheckpoint
      dirpath: {out}
      filename: best
      monitor: val0_epoch/weighted_sum
      save_last: true
training_module:
  _target_: nequip.train.EMALightningModule
  ema_decay: 0.9
  loss: {{_target_: nequip.train.EnergyForceLoss, coeffs: {{total_energy: 1.0, forces: 1.0}}}}
  val_metrics: {{_target_: nequip.train.EnergyForceMetrics, coeffs: {{total_energy_mae: 1.0, forces_mae: 1.0}}}}
  test_metrics: {{_target_: nequip.train.EnergyForceMetrics, coeffs: {{total_energy_mae: 1.0, forces_mae: 1.0}}}}
  optimizer: {{_target_: torch.optim.Adam, lr: 0.01}}
  model:
    _target_: nequip.model.NequIPGNNModel
    seed: 1
    model_dtype: float64
    type_names: [H, C, O]
    r_max: 4.0
    num_layers: 2
    l_max: 1
    num_features: 4
    radial_mlp_width: 8
    avg_num_neighbors: 5.0
    per_type_energy_scales: 1.0
    per_type_energy_shifts: 0.0
"""

LOOK = """
import json, sys
from nequip.model.saved_models import load_saved_model
from nequip.utils.global_state import set_global_state
set_global_state()
import torch
for path in sys.argv[1:]:
    model = load_saved_model(path).eval()
    output = model(torch.load("atoms.pt"))
    print(json.dumps({
        "ace": sorted(name for name in sys.modules if name.startswith("ace_")),
        "modules": [name for name, _ in model.named_modules() if "ace" in name.split(".")],
        "energy": output["total_energy"].tolist(),
        "forces": output["forces"].tolist(),
    }))
"""
ACE = (sys.executable, "-m", "ace_plugins")
COMMANDS = Path(sys.executable).parent


class Folder:
    """A data set of pairs on springs, and runs of nequip's commands on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        frames = []
        for seed in range(20):
            atoms = batch(torch.Generator().manual_seed(seed), molecules=1)
            pos = atoms["pos"].requires_grad_(True)
            lengths = (pos[:, None] - pos[None])[~torch.eye(len(pos), dtype=torch.bool)].norm(dim=-1)
            total = (lengths - 2).square().sum() / 20
            (gradient,) = torch.autograd.grad(total, pos)
            kinds = ["HCO"[kind] for kind in atoms["atom_types"]]
            rows = zip(kinds, pos.tolist(), (-gradient).tolist(), strict=True)
            lines = [" ".join([kind, *map(str, [*where, *force])]) for kind, where, force in rows]
            about = f'Properties=species:S:1:pos:R:3:forces:R:3 energy={total.item()} pbc="F F F"'
            frames.append("\n".join([str(len(pos)), about, *lines]))
        (path / "data.xyz").write_text("\n".join(frames) + "\n")
        torch.save(data(), path / "atoms.pt")

    def run(self, *words: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
        told: Any = {"cwd": self.path, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(list(words), check=False, **told)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done

    def train(self, name: str, *before: str) -> tuple[Path, str]:
        """Return the final checkpoint and the output of the training."""
        (self.path / f"{name}.yaml").write_text(CONFIG.format(folder=self.path, out=self.path / name))
        command = COMMANDS / "nequip-train" if not before else "nequip-train"
        done = self.run(*before, command, "-cp", self.path, "-cn", f"{name}.yaml")
        return self.path / name / "last.ckpt", done.stdout + done.stderr

    def look(self, *paths: Path, run: Sequence[str] = (sys.executable,)) -> list[dict[str, Any]]:
        """Evaluate saved models with nequip in a new process."""
        done = self.run(*run, "-c", LOOK, *paths)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("nequip"))


def table(printed: str) -> list[str]:
    return re.findall(r"test0_epoch/\w+\W+[\d.e+-]+", printed)


def without_ace(path: Path, to: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)
        export(path, to)
    assert not [name for name in states(to) if "ace" in name.split(".")]


def states(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_off_is_the_unpatched_training_bit_for_bit(folder: Folder) -> None:
    plain, printed = folder.train("plain")
    off, off_printed = folder.train("off", *ACE, "run", "nequip", "--mode", "off", "--")
    assert table(printed)
    assert table(off_printed) == table(printed)
    one, two = states(plain), states(off)
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_strict_trains_lands_and_is_deployed_without_ace(folder: Folder) -> None:
    run = (*ACE, "run", "nequip", "--mode", "strict", "--")
    trained, printed = folder.train("strict", *run)
    assert "budget: 15 steps (Lightning's trainer)" in printed
    assert "ACE strict, landed at step" in printed
    plain, package = trained.with_name("plain.ckpt"), folder.path / "strict.nequip.zip"
    without_ace(trained, plain)
    averages, before = ([n for n in states(path) if n.startswith("ema.")] for path in (plain, trained))
    assert 0 < len(averages) < len(before)
    folder.run(COMMANDS / "nequip-package", "build", plain, package)
    alone, packaged = folder.look(plain, package)
    (kept,) = folder.look(trained, run=run)
    for found in (alone, packaged):
        assert found["ace"] == found["modules"] == []
    assert (alone["energy"], alone["forces"]) == (kept["energy"], kept["forces"]), "strict deploys f_eq"
    torch.testing.assert_close(packaged["forces"], alone["forces"], rtol=1e-10, atol=1e-10)


def test_resilient_is_deployed_with_its_branches_or_without(folder: Folder) -> None:
    run = (*ACE, "run", "nequip", "--mode", "resilient", "--spectral-norm", "--")
    trained, _ = folder.train("resilient", *run)
    package, plain = folder.path / "resilient.nequip.zip", trained.with_name("plain.ckpt")
    folder.run(*run, "nequip-package", "build", "--mode", "ace", trained, package)
    kept, packaged = folder.look(trained, package, run=run)
    assert kept["modules"]
    assert packaged["modules"], "a package with branches refers to ace-plugins"
    torch.testing.assert_close(packaged["forces"], kept["forces"], rtol=1e-10, atol=1e-10)
    without_ace(trained, plain)
    (alone,) = folder.look(plain)
    assert alone["ace"] == alone["modules"] == []
    assert alone["energy"] != kept["energy"]


def test_the_example_is_the_same_each_time_and_leaves_the_process_as_it_was() -> None:
    kind, state = torch.get_default_dtype(), torch.random.get_rng_state()
    one, two = molecules_example(3), molecules_example(3)
    assert all(torch.equal(a, b) for a, b in zip(one.args[0].values(), two.args[0].values(), strict=True))
    assert torch.get_default_dtype() == kind
    assert torch.equal(torch.random.get_rng_state(), state)
