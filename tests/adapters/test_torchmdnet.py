"""The TorchMD-NET adapter on the real torchmd-net: forces in every mode, and torchmd-train from data to deployment."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("torchmdnet", reason="needs torchmd-net: pip install 'ace-torchmdnet[upstream]'")

from ace_plugins import adapter as ace
from ace_plugins import attach, audit, averaged, bounds, equivariance_error, export, patched, use_branches
from ace_plugins.compare.trial import MetricReader
from ace_plugins.errors import AceError, AceWarning, AdapterError
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import parametrize_with_checks
from ace_torchmdnet.actions import TensorFeatures, group_action
from ace_torchmdnet.command import script
from ace_torchmdnet.example import MODELS, molecules, small_example, small_model

MODES = ("strict", "resilient", "bounded", "scheduled")
ALL = (*MODELS, "tensornet2")
QUIET: dict[str, Any] = {"trace": False, "tell": False}
Atoms = tuple[Tensor, Tensor, Tensor]
Model = Callable[..., tuple[Tensor, Tensor]]


@parametrize_with_checks("torchmdnet")
def test_contract(check: Any) -> None:
    check()


@parametrize_with_checks("torchmdnet", seed=1)
def test_contract_of_a_tensornet(check: Any) -> None:
    check()


def small(kind: str, **options: Any) -> Any:
    """Return a model in float64, with weights from a fixed seed."""
    torch.manual_seed(0)
    return small_model(kind, **{"precision": 64, "q_dim": 4, **options})


def data() -> Atoms:
    torch.manual_seed(1)
    z, pos, batch = molecules((1, 6, 8), torch.float64)
    return z, pos, batch


def relaxed(kind: str, mode: str = "strict", gamma: float = 1.0, **settings: Any) -> Any:
    """Return a model in eval mode with large gammas, whatever the mode starts with."""
    bounded = mode in ("resilient", "bounded")
    model = attach(small(kind), mode=mode, **{**QUIET, "spectral_norm": bounded, **settings}).eval()
    with torch.no_grad():
        model.ace.gamma.fill_(gamma)
        if mode == "scheduled":
            for weight in model.ace.branches.parameters():
                weight.mul_(1e3)
    return model


# Where ACE goes in.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "equivariant-transformer"}, ["layer1.x", "layer1.vec", "output.x", "output.vec"]),
        ({"model": "equivariant-transformer", "num_layers": 1}, ["output.x", "output.vec"]),
        ({"model": "equivariant-transformer", "output_model": "ElectronicSpatialExtent"}, ["layer1.x"]),
        ({"model": "tensornet", "num_layers": 3}, ["layer0", "layer1", "layer2"]),
        ({"model": "tensornet2", "q_dim": 4}, ["layer0", "layer1"]),
    ],
)
def test_sites(options: dict[str, Any], expected: list[str]) -> None:
    model: Any = attach(small_model(**options), **QUIET)
    assert [site.name for site in model.ace.sites] == expected
    assert all(site.shape_in[0] == 3 for site in model.ace.sites), "none reads scalars alone"


def test_the_first_attention_layer_is_given_no_vectors() -> None:
    model = small("equivariant-transformer")
    seen: list[Tensor] = []
    for layer in model.representation_model.attention_layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[1].detach()))
    model(*data())
    assert [bool(vectors.any()) for vectors in seen] == [False, True]


@pytest.mark.parametrize("kind", ALL)
def test_how_the_group_acts_at_the_sites(kind: str) -> None:
    model = relaxed(kind, gamma=0.0, frames="off")
    found = audit(model, data())
    judged = {layer.name: layer for layer in found.layers if layer.known}
    assert {site.module for site in model.ace.sites} <= judged.keys()
    assert max(layer.after or 0.0 for layer in judged.values()) < 1e-9


def test_tensors_of_a_reflected_molecule_are_transposed() -> None:
    """Rotations act like on tensors of rank 2; the point reflection transposes."""
    x, still = torch.randn(2, 3, 3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    rotation = ace.SO3.sample(torch.Generator().manual_seed(0)).matrix
    turned = torch.einsum("ab,nbcf,dc->nadf", rotation, x, rotation)
    for matrix, expected in ((rotation, turned), (-rotation, turned.transpose(1, 2))):
        torch.testing.assert_close(TensorFeatures().act(ace.Rigid(matrix, still), x), expected)
    each = ace.E3.sample_many(8, torch.Generator().manual_seed(0), scale=0.0)
    many = TensorFeatures().act(each, x[:1].expand(8, 3, 3, 5))
    for number, matrix in enumerate(each.matrix):
        one = TensorFeatures().act(ace.Rigid(matrix, still), x[:1])
        torch.testing.assert_close(many[number], one[0])


@pytest.mark.parametrize(("kind", "name"), [("graph-network", "TorchMD_GN"), ("transformer", "TorchMD_T")])
def test_invariant_models_are_refused(kind: str, name: str) -> None:
    with warnings.catch_warnings(record=True):  # upstream has its own of the transformer shown, whatever is ignored
        model = small_model(kind)
    with pytest.raises(AceError, match=f"{name}.*scalar.*equivariant-transformer, tensornet"):
        attach(model, **QUIET)
    assert not hasattr(model, "ace")


def test_a_representation_of_somebodys_own_is_refused() -> None:
    model = small_model()
    model.representation_model.__class__ = type("Mine", (type(model.representation_model),), {})
    with pytest.raises(AdapterError, match="representation_model: Mine"):
        attach(model, **QUIET)


# Energies and forces.


def check_forces(model: Model, atoms: Atoms, forces: Tensor, step: float = 1e-4) -> None:
    """Compare with central differences of the energy in random directions."""
    z, pos, batch = atoms
    directions = torch.randn(6, *pos.shape, dtype=pos.dtype)
    for each in directions / directions.flatten(1).norm(dim=1)[:, None, None]:
        there, back = (float(model(z, pos + sign * step * each, batch)[0].detach().sum()) for sign in (1, -1))
        assert (back - there) / (2 * step) == pytest.approx(float((forces * each).sum()), abs=1e-6)


def exported(model: Any, kind: str) -> Any:
    plain = small(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)  # of the gamma that is left
        plain.load_state_dict(export(model.state_dict()), strict=True)
    return plain.eval()


@pytest.mark.parametrize("form", ["attached", "exported", "averaged"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ALL)
def test_forces_are_minus_the_gradient_of_the_energy(kind: str, mode: str, form: str) -> None:
    model, atoms = relaxed(kind, mode), data()
    made = {
        "attached": lambda: model,
        "exported": lambda: exported(model, kind),
        "averaged": lambda: averaged(model, 2),
    }
    judged = made[form]()
    with use_branches(model, True):
        forces = judged(*atoms)[1].detach()
        with use_branches(model, False):
            without = judged(*atoms)[1]
        assert torch.allclose(forces, without, atol=1e-4) is (form == "exported"), "the branches count"
        check_forces(judged, atoms, forces)
    net = torch.zeros(2, 3, dtype=forces.dtype).index_add(0, atoms[2], forces)
    assert float(net.abs().max()) < 1e-12, "the net force on a molecule"


def test_forces_of_a_training_step_in_random_frames_are_those_of_its_energy() -> None:
    """Each forward pass has another random frame, so compare with autograd within one pass."""
    model = relaxed("tensornet", frames="on").train()
    z, pos, batch = data()
    pos.requires_grad_(True)
    energy, forces = model(z, pos, batch)
    (gradient,) = torch.autograd.grad(energy.sum(), pos)
    torch.testing.assert_close(forces, -gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ALL)
def test_at_gamma_zero_energies_are_invariant_and_forces_turn(kind: str, mode: str) -> None:
    atoms, model = data(), relaxed(kind, mode, gamma=0.0)
    matrix, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    z, pos, batch = atoms
    with use_branches(model, True):
        energy, forces = model(*atoms)
        for turn in (matrix, -matrix):
            found = model(z, pos @ turn.T + 1.0, batch)
            torch.testing.assert_close(found, (energy, forces @ turn.T), rtol=1e-9, atol=1e-9)
    assert equivariance_error(model, atoms, branches_on=True).relative < 1e-9
    assert equivariance_error(relaxed(kind, mode), atoms, branches_on=True).relative > 1e-4


@pytest.mark.parametrize("kind", ALL)
def test_translations_change_nothing_with_branches(kind: str) -> None:
    model, (z, pos, batch) = relaxed(kind), data()
    with use_branches(model, True):
        here, there = (model(z, pos + shift, batch) for shift in (0.0, torch.tensor([3.0, -1.0, 2.0])))
    torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Skipping gradients for 1 atoms")
def test_an_atom_alone_keeps_its_energy() -> None:
    model = relaxed("equivariant-transformer")
    one = torch.tensor([6]), torch.zeros(1, 3, dtype=torch.float64), torch.tensor([0])
    with use_branches(model, True):
        energy = model(*one)[0]
    assert torch.equal(energy, exported(model, "equivariant-transformer")(*one)[0])


def test_other_outputs_turn_as_they_are() -> None:
    """Test the length of a dipole, a vector output, and a TensorNet without reflection symmetry."""
    options = {"model": "equivariant-transformer", "derivative": False, "precision": 64}
    for output, kind in (("DipoleMoment", ace.Invariant), ("VectorOutput", ace.Vectors)):
        model = attach(small_model(**options, output_model=output), mode="resilient", spectral_norm=True, **QUIET)
        action = group_action(model)
        assert (type(action.outputs[0]), action.outputs[1]) == (kind, None)
        with torch.no_grad():
            model.ace.gamma.zero_()
            assert equivariance_error(model, data(), branches_on=True).relative < 1e-9
            model.ace.gamma.fill_(1.0)
            assert equivariance_error(model, data(), branches_on=True).relative > 1e-4
    handed = attach(small("tensornet", equivariance_invariance_group="SO(3)"), frames="off", **QUIET)
    assert group_action(handed).group is ace.SE3
    assert equivariance_error(handed.eval(), data()).relative < 1e-9


def test_branches_have_a_bound() -> None:
    for kind in ALL:
        found = bounds(relaxed(kind, "resilient"), data())
        assert 0 < found.B < 1.2, "divided by their norms; SiLU has a slope of 1.1"
        assert found.measured_1 <= found.theorem_1


# Periodic systems.


BOX = 10.0 * torch.eye(3, dtype=torch.float64)


def test_periodic_systems_train_without_random_frames() -> None:
    for options, call in (({"box_vecs": BOX.tolist()}, {}), ({}, {"box": BOX})):
        model = small("tensornet", **options)
        if options:
            with pytest.warns(AceWarning, match="box_vecs"):
                attach(model, **QUIET)
        else:
            attach(model, frames="off", **QUIET)
        _, forces = model(*data(), **call)
        forces.square().sum().backward()
        assert model.ace.gamma.grad is not None
    framed = attach(small("tensornet"), frames="on", **QUIET)
    with pytest.raises(AdapterError, match="box.*frames = 'off'"):
        framed(*data(), box=BOX)


# What torchmd-train says.


def test_reading_the_command_line(tmp_path: Path) -> None:
    command = "/somewhere/bin/torchmd-train"
    config, silent = tmp_path / "run.yaml", tmp_path / "silent.yaml"
    config.write_text("model: tensornet\nnum_epochs: 30  # few\nlr: 0.01\n")
    silent.write_text("model: tensornet\n")
    (tmp_path / "hparams.yaml").write_text("num_epochs: 12\n")
    option, default = "torchmd-train --num-epochs", "torchmd-train's default"
    told = {
        (command, "--num-epochs", "7"): (7, option),
        (command, "--conf", str(config), "--num-epochs=7"): (7, option),
        (command, "--num-epochs", "7", "-c", str(config)): (30, str(config)),
        (command, "--num-epochs", "7", "-c", str(silent)): (7, option),
        (command, "--conf", str(silent), "--num-layers", "3"): (300, default),
        (command, "--conf", "missing.yaml"): (300, default),
        (command, "--load-model", str(tmp_path / "epoch=3.ckpt")): (12, str(tmp_path / "hparams.yaml")),
        ("/lib/torchmdnet/scripts/train.py",): (300, default),
    }
    for argv, expected in told.items():
        found = script(argv)
        assert found is not None
        assert (found.epochs, found.source, found.seed) == (*expected, "--seed")
    for other in ((), ("train.py", "--num-epochs", "7"), (command, "--num-epochs", "many")):
        assert script(other) is None


def test_how_results_are_printed() -> None:
    found = script(("torchmd-train",))
    assert found is not None
    reading = MetricReader(found.metrics)
    for line in (
        "│    test_neg_dy_l1_loss    │    0.13852043449878693    │",
        "│    test_total_l1_loss     │   3.1862146854400635e-05  │",
        "│      test_y_l1_loss       │            nan            │",
    ):
        reading.feed(line, 0.0)
    energy = reading.values.pop("test energy")
    assert reading.values == {"test forces": 0.13852043449878693, "test": 3.1862146854400635e-05}
    assert energy != energy


def test_batches_are_made_for_trained_models() -> None:
    model = small("tensornet", max_z=7)
    made = registry().adapter("torchmdnet").example(0, model)
    assert made.model is model
    assert int(made.args[0].max()) < 7
    assert audit(model, ace.Call(made.args, made.kwargs), samples=2).verdict == "symmetric"
    assert type(small_example(1).model.representation_model).__name__ == "TensorNet"


# torchmd-train, in processes of its own.


CONFIG = """
model: equivariant-transformer
embedding_dimension: 8
num_layers: 2
num_rbf: 8
num_heads: 2
neighbor_embedding: true
max_z: 10
derivative: true
dataset: Custom
coord_files: pos.npy
embed_files: z.npy
energy_files: y.npy
force_files: neg_dy.npy
train_size: 12
val_size: 4
test_size: 4
batch_size: 4
num_epochs: 5
save_interval: 1
lr: 0.01
lr_warmup_steps: 4
gradient_clipping: 10.0
ngpus: 1
num_workers: 0
"""
ACE = (sys.executable, "-m", "ace_plugins")
TRAIN = Path(sys.executable).with_name("torchmd-train")
WITHOUT = """
import json, sys
sys.modules["ace_plugins"] = sys.modules["ace_torchmdnet"] = None  # as if they were not installed
import torch
from torchmdnet.models.model import load_model
model = load_model(sys.argv[1]).eval()
energy, forces = model(*torch.load("atoms.pt"))
print(json.dumps([energy.tolist(), forces.tolist(), len(model.state_dict())]))
"""


class Folder:
    """A data set of atoms on springs, and runs of torchmd-train on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.printed: dict[str, str] = {}
        torch.manual_seed(2)
        z, pos, _ = molecules((1, 6, 8), torch.float64, count=20)
        pos = pos.view(20, 6, 3).requires_grad_(True)
        lengths = torch.stack([torch.nn.functional.pdist(each) for each in pos])
        energies = (lengths - 2).square().sum(1) / 20
        (gradient,) = torch.autograd.grad(energies.sum(), pos)
        arrays = {"pos": pos, "y": energies[:, None], "neg_dy": -gradient}
        for name, array in arrays.items():
            numpy.save(path / f"{name}.npy", array.detach().float().numpy())
        numpy.save(path / "z.npy", z[:6].numpy())
        (path / "conf.yaml").write_text(CONFIG)
        torch.save(small_example(0).args, path / "atoms.pt")

    def run(self, *words: str | os.PathLike[str], fails: bool = False) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
        told: Any = {"cwd": self.path, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(list(words), check=False, **told)
        assert (done.returncode != 0) is fails, done.stdout[-2000:] + done.stderr[-3000:]
        return done

    def train(self, name: str, *settings: str, more: Sequence[str] = ("--conf", "conf.yaml")) -> list[Path]:
        """Return the checkpoints of all epochs of a run, made on first use. Without settings it is not patched."""
        if name not in self.printed:
            before = [*ACE, "run", "torchmdnet", *settings, "--"] if settings else [sys.executable]
            done = self.run(*before, TRAIN, *more, "--log-dir", name)
            self.printed[name] = done.stdout + done.stderr
        return sorted((self.path / name).glob("*.ckpt"))

    def metrics(self, name: str) -> list[dict[str, str]]:
        """Return all numbers that Lightning logs."""
        with (self.path / name / "metrics.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("torchmdnet"))


def states(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return state


def evaluated(folder: Folder, checkpoint: Path, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of a checkpoint with branches, loaded by upstream in this process."""
    from torchmdnet.models.model import load_model

    with patched("torchmdnet", **QUIET, **settings):
        model = load_model(str(checkpoint)).eval()
    assert hasattr(model, "ace")
    energy, forces = model(*torch.load(folder.path / "atoms.pt"))
    return energy, forces


def without_ace(folder: Folder, checkpoint: Path) -> tuple[Tensor, Tensor, int]:
    done = folder.run(sys.executable, "-c", WITHOUT, checkpoint)
    energy, forces, entries = json.loads(done.stdout.splitlines()[-1])
    return torch.tensor(energy), torch.tensor(forces), entries


def test_off_is_the_unpatched_run_bit_for_bit(folder: Folder) -> None:
    plain, off = folder.train("plain"), folder.train("off", "--mode", "off")
    assert len(folder.metrics("plain")) > 5
    assert folder.metrics("off") == folder.metrics("plain")
    for path, other in zip(plain, off, strict=True):
        one, two = states(path), states(other)
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_strict_trains_lands_and_is_deployed_without_ace(folder: Folder) -> None:
    trained, plain = folder.train("strict", "--mode", "strict")[-1], folder.path / "plain.ckpt"
    printed = folder.printed["strict"]
    assert "5 epochs (conf.yaml)" in printed
    assert printed.count("ACE strict, landed at step") == 1, "and not again for the model that is tested"
    folder.run(*ACE, "export", trained, "-o", plain)
    assert not [name for name in states(plain) if "ace" in name.split(".")]
    energy, forces, entries = without_ace(folder, plain)
    assert entries == len(small_model().state_dict())
    expected = evaluated(folder, trained, mode="strict")
    assert torch.equal(energy, expected[0]), "strict deploys f_eq"
    assert torch.equal(forces, expected[1])


def test_resilient_keeps_its_branches_until_it_is_exported(folder: Folder) -> None:
    more = ["--conf", "conf.yaml", "--num-epochs", "4", "--model", "tensornet"]
    trained = folder.train("resilient", "--mode", "resilient", "--spectral-norm", more=more)[-1]
    assert "4 epochs (torchmd-train --num-epochs)" in folder.printed["resilient"]
    kept = evaluated(folder, trained, mode="resilient", spectral_norm=True)
    plain = folder.path / "f_eq.ckpt"
    folder.run(*ACE, "export", trained, "-o", plain)
    energy, _, _ = without_ace(folder, plain)
    assert not torch.equal(energy, kept[0])


def test_a_run_is_resumed_with_its_duals(folder: Folder) -> None:
    second = folder.train("strict", "--mode", "strict")[1]
    more = ["--load-model", str(second), "--num-epochs", "7"]
    third, *_ = folder.train("resumed", "--mode", "strict", more=more)
    assert "7 epochs (torchmd-train --num-epochs)" in folder.printed["resumed"]
    assert third.name.startswith("epoch=2-")
    assert float(states(third)["model.ace.duals.steps"]) == 9, "it goes on where the checkpoint left off"


def test_a_plain_model_goes_on_with_ace(folder: Folder) -> None:
    weights = str(folder.train("plain")[-1])
    folder.train("weights", "--mode", "strict", more=["--conf", "conf.yaml", "--load-weights", weights])
    assert "ACE strict, landed at step" in folder.printed["weights"]


def test_an_invariant_model_is_refused_in_one_line(folder: Folder) -> None:
    words = [*ACE, "run", "torchmdnet", "--", TRAIN, "--conf", "conf.yaml", "--model", "graph-network", "-l", "refused"]
    done = folder.run(*words, fails=True)
    assert "TorchMD_GN only has scalar features" in done.stderr
    assert "Traceback" not in done.stderr
