"""The SchNetPack adapter on the real schnetpack: forces in every mode, and spktrain from data to deployment."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("schnetpack") is None:
    pytest.skip("needs schnetpack, installed in steps: adapters/schnetpack/README.md", allow_module_level=True)

from ace_plugins import AceWarning, attach, audit, averaged, equivariance_error, export, status, use_branches
from ace_plugins import adapter as ace
from ace_plugins.compare.trial import MetricReader
from ace_plugins.errors import AdapterError
from ace_plugins.patch.shims import REPAIRS
from ace_plugins.plugins.registry import registry
from ace_plugins.symmetry.graphs import PerGraph
from ace_plugins.testing import parametrize_with_checks
from ace_schnetpack.action import Stress, group_action
from ace_schnetpack.command import METRICS, script
from ace_schnetpack.example import batch, small_example, small_model

REPAIRS.make_importable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning, on the newest torch
    from schnetpack import atomistic, representation
    from schnetpack import nn as parts
    from schnetpack.data import ASEAtomsData
    from schnetpack.model import NeuralNetworkPotential
    from schnetpack.train import ReduceLROnPlateau

MODES = ("strict", "resilient", "bounded", "scheduled")
Data = dict[str, Tensor]
QUIET: dict[str, Any] = {"trace": False, "tell": False}


@parametrize_with_checks("schnetpack")
def test_contract(check: Any) -> None:
    check()


def data(seed: int = 0) -> Data:
    """Return a molecule and a crystal in float64."""
    made: Data = small_example(seed).args[0]
    return made


def relaxed(mode: str = "strict", gamma: float = 1.0, kind: str = "PaiNN", **settings: Any) -> Any:
    """Return a model in float64 and eval mode, with all gammas equal."""
    torch.manual_seed(0)
    model = small_example(0, kind).model
    attach(model, mode=mode, **{**QUIET, "spectral_norm": mode in ("resilient", "bounded"), **settings})
    with torch.no_grad():
        model.ace.gamma.fill_(gamma)
        if mode == "scheduled":
            for weight in model.ace.branches.parameters():
                weight.mul_(1e3)
    return model.eval()


def field_schnet(field: str, *responses: str) -> Any:
    torch.manual_seed(0)
    sizes = {"n_atom_basis": 8, "n_interactions": 2, "external_fields": [field]}
    made = representation.FieldSchNet(
        radial_basis=parts.GaussianRBF(6, 3.5), cutoff_fn=parts.CosineCutoff(3.5), **sizes
    )
    with torch.no_grad():
        for weight in made.parameters():  # some begin at 0, and with them what atoms do to each other
            weight.add_(0.1 * torch.randn_like(weight))
    outputs = [atomistic.Atomwise(n_in=8, output_key="energy"), atomistic.Response("energy", list(responses))]
    inputs = [atomistic.StaticExternalFields([field]), atomistic.PairwiseDistances()]
    return NeuralNetworkPotential(made, inputs, outputs).double()


# Where ACE goes in.


def test_sites_of_painn_read_its_vectors() -> None:
    sites = relaxed().ace.sites
    assert [site.name for site in sites] == ["layer0.q", "layer0.mu", "layer1.q", "layer1.mu", "layer2.q"]
    assert {(site.reads.argument, site.shape_in) for site in sites} == {("mu", (3, 8))}
    assert [site.module for site in sites[::2]] == [f"representation.mixing.{n}" for n in range(3)]
    found = audit(relaxed(gamma=0.0), (data(),))
    judged = {layer.name: layer for layer in found.layers if layer.known}
    assert max(layer.after or 0 for name, layer in judged.items() if "mixing" in name) < 1e-9, "and they turn so"


def test_shared_layers_are_one_site_that_is_called_several_times() -> None:
    made = small_example(0, shared_interactions=True)
    plain = copy.deepcopy(made.model).eval()
    calls: list[str] = []
    model = attach(made.model, **QUIET).eval()
    assert [site.name for site in model.ace.sites] == ["layers.q", "layers.mu"]
    model.ace.branch("layers.q").register_forward_hook(lambda *_: calls.append("q"))
    with torch.no_grad():
        model.ace.gamma.fill_(1.0)
    with use_branches(model, True):
        forces = model(data())["forces"]
        torch.testing.assert_close(forces, as_differentiated(model, data()), rtol=1e-6, atol=1e-6)
    assert calls[:3] == ["q"] * 3
    assert len(calls) == 3 * (1 + 2 * forces.numel())
    assert not torch.allclose(forces, plain(data())["forces"], atol=1e-4)
    with torch.no_grad():
        model.ace.gamma.fill_(0.0)
    assert equivariance_error(model, (data(),), branches_on=True).relative < 1e-9


def test_models_without_directions_are_refused() -> None:
    for kind in ("SchNet", "FieldSchNet"):
        model = small_model(kind)
        with pytest.raises(AdapterError, match=f"{kind}.*expected a model with PaiNN"):
            attach(model)
        assert not hasattr(model, "ace")


@pytest.mark.parametrize(
    ("field", "group"), [("electric_field", "E(3)"), ("magnetic_field", "SE(3)")], ids=["electric", "magnetic"]
)
def test_field_schnet(field: str, group: str) -> None:
    responses = ["forces", "dipole_moment", "polarizability"] if field == "electric_field" else ["forces"]
    model = attach(field_schnet(field, *responses), **QUIET)
    torch.manual_seed(1)
    atoms = {**data(), field: torch.randn(2, 3).double(), "nuclear_magnetic_moments": torch.randn(10, 3).double()}
    errors = []
    for gamma in (0.0, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        errors.append(equivariance_error(model, (atoms,), branches_on=True))
    assert errors[0].relative < 1e-9 < 1e-3 < errors[1].relative
    assert errors[0].group == group
    assert group_action(model).tensors_to_compare(model(dict(atoms))).keys() == {f"output.{name}" for name in responses}


def test_so3net() -> None:
    """Constants of SO3net are in single precision."""
    errors = [
        equivariance_error(relaxed(gamma=gamma, kind="SO3net"), (data(),), branches_on=True).relative
        for gamma in (0.0, 1.0)
    ]
    assert errors[0] < 1e-7 < 1e-3 < errors[1]


# How the group acts.


def test_dipoles_and_polarizabilities_turn_about_the_origin() -> None:
    outputs = [atomistic.DipoleMoment(8, use_vector_representation=True, return_charges=True)]
    model = small_model(stress=False, output_modules=[*outputs, atomistic.Polarizability(8)]).double()
    attach(model, **QUIET)
    assert group_action(model).group is ace.O3
    assert equivariance_error(model, (data(),), branches_on=False).relative < 1e-9
    assert equivariance_error(model, (data(),), branches_on=True).relative > 1e-4


def test_outputs_without_a_known_action_are_trained_on_without_random_frames() -> None:
    model = field_schnet("electric_field", "forces", "hessian")
    with pytest.warns(AceWarning, match="hessian"):
        attach(model, **QUIET)
    assert model.ace.action is None


def test_stress_changes_sign_with_the_volume() -> None:
    """Upstream divides by the signed volume, so a reflection of the cell also changes the sign of the stress."""
    model = small_example(0).model.eval()
    mirror = torch.diag(torch.tensor([-1.0, 1, 1], dtype=torch.float64))
    element = ace.Rigid(mirror, torch.zeros(3, dtype=torch.float64))
    (turned,), _ = group_action(model).act_on_inputs(element, ["inputs"], (data(),), {})
    torch.testing.assert_close(turned["_cell"], data()["_cell"] @ mirror)
    here, there = model(data())["stress"].detach(), model(turned)["stress"].detach()
    torch.testing.assert_close(there, -mirror @ here @ mirror, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(Stress()(element, here), there, rtol=1e-9, atol=1e-12)


def test_each_structure_of_a_batch_has_a_separate_frame() -> None:
    model, atoms = relaxed(), data()
    action = group_action(model)
    frame = action.sample_frame(torch.Generator().manual_seed(0), ["inputs"], (atoms,), {})
    assert isinstance(frame, PerGraph)
    (turned,), _ = action.act_on_inputs(frame, ["inputs"], (atoms,), {})
    with use_branches(model, False):
        found = action.act_on_outputs(frame.inverse(), model(turned))
        expected = model(atoms)
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


# Energies and forces.


def as_differentiated(model: nn.Module, atoms: Data, step: float = 1e-4) -> Tensor:
    """Return minus the gradient of the energy by central differences."""
    found = torch.zeros_like(atoms["_positions"])
    for place in range(found.numel()):
        shift = torch.zeros_like(found).view(-1)
        shift[place] = step
        ends = []
        for sign in (1, -1):
            moved = {**atoms, "_positions": atoms["_positions"].detach() + sign * shift.view_as(found)}
            ends.append(float(model(moved)["energy"].detach().sum()))
        found.view(-1)[place] = -(ends[0] - ends[1]) / (2 * step)
    return found


def exported(model: Any) -> Any:
    plain = small_example(0).model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)
        plain.load_state_dict(export(model.state_dict()), strict=True)
    return plain.eval()


@pytest.mark.parametrize("form", ["attached", "exported", "averaged"])
@pytest.mark.parametrize("mode", MODES)
def test_forces_are_minus_the_gradient_of_the_energy(mode: str, form: str) -> None:
    model, atoms = relaxed(mode), data()
    made = {"attached": lambda: model, "exported": lambda: exported(model), "averaged": lambda: averaged(model, 3)}
    judged = made[form]()
    with use_branches(model, True):
        forces = judged(dict(atoms))["forces"].detach()
        with use_branches(model, False):
            without = judged(dict(atoms))["forces"]
        assert torch.allclose(forces, without, atol=1e-4) is (form == "exported"), "the branches count"
        torch.testing.assert_close(forces, as_differentiated(judged, atoms), rtol=1e-6, atol=1e-6)
    net = torch.zeros(2, 3, dtype=forces.dtype).index_add(0, atoms["_idx_m"], forces)
    assert float(net.abs().max()) < 1e-12, "the net force on a structure"


def test_stress_is_the_derivative_by_strain_of_a_crystal() -> None:
    model, atoms = relaxed("resilient"), data()
    crystal, edges = atoms["_idx_m"] == 1, atoms["_idx_m"][atoms["_idx_i"]] == 1
    cell = atoms["_cell"][1]

    def energy(strain: Tensor) -> float:
        stretch = torch.eye(3, dtype=torch.float64) + strain
        bent = {name: value.detach().clone() for name, value in atoms.items()}
        bent["_positions"][crystal] = bent["_positions"][crystal] @ stretch
        bent["_offsets"][edges] = bent["_offsets"][edges] @ stretch
        bent["_cell"][1] = cell @ stretch
        return float(model(bent)["energy"][1].detach())

    stress = model(dict(atoms))["stress"][1].detach()
    volume = float(torch.linalg.det(cell))
    for seed in range(3):
        strain = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        strain = (strain + strain.T) / strain.norm()
        slope = (energy(1e-4 * strain) - energy(-1e-4 * strain)) / 2e-4
        assert slope / volume == pytest.approx(float((stress * strain).sum()), abs=1e-6)


def test_forces_of_a_training_step_in_random_frames_are_those_of_its_energy() -> None:
    """Each forward pass has another random frame, so compare with autograd within one pass."""
    model = relaxed("strict", frames="on").train()
    atoms = data()
    atoms["_positions"].requires_grad_(True)
    output = model(dict(atoms))
    (gradient,) = torch.autograd.grad(output["energy"].sum(), atoms["_positions"])
    torch.testing.assert_close(output["forces"], -gradient, rtol=1e-10, atol=1e-10)
    assert equivariance_error(model, (data(),), branches_on=True).relative > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_at_gamma_zero_energies_are_invariant_and_forces_turn(mode: str) -> None:
    atoms, model = data(), relaxed(mode, gamma=0.0)
    action, moved = group_action(model), ace.E3.sample(torch.Generator().manual_seed(1))
    (turned,), _ = action.act_on_inputs(moved, ["inputs"], (atoms,), {})
    with use_branches(model, True):
        expected = action.act_on_outputs(moved, model(dict(atoms)))
        found = model(turned)
    assert action.tensors_to_compare(found).keys() == {"output.forces", "output.stress"}
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    assert equivariance_error(model, (atoms,), branches_on=True).relative < 1e-9
    assert equivariance_error(relaxed(mode), (atoms,), branches_on=True).relative > 1e-5


def test_translations_change_nothing_with_branches() -> None:
    model, atoms = relaxed(), data()
    moved = {**atoms, "_positions": atoms["_positions"] + torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)}
    with use_branches(model, True):
        here, there = model(dict(atoms)), model(moved)
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(here[name], there[name], rtol=1e-10, atol=1e-10)


def test_an_atom_alone_keeps_its_energy() -> None:
    model = relaxed()
    one = {
        "_positions": torch.zeros(1, 3, dtype=torch.float64),
        "_cell": torch.eye(3, dtype=torch.float64)[None],
        "_atomic_numbers": torch.tensor([6]),
        "_n_atoms": torch.tensor([1]),
        "_idx_m": torch.tensor([0]),
        "_offsets": torch.zeros(0, 3, dtype=torch.float64),
        **{name: torch.zeros(0, dtype=torch.long) for name in ("_idx_i", "_idx_j")},
    }
    with use_branches(model, True):
        with_branches = model(dict(one))["energy"]
    assert torch.equal(with_branches, exported(model)(one)["energy"])


def test_audit_of_a_model_that_is_given_finds_where_the_symmetry_ends() -> None:
    model = relaxed("resilient").float()
    made = registry().adapter("schnetpack").example(0, model)
    assert made.model is model
    assert made.args[0]["_positions"].dtype is torch.float32
    found = audit(model, made.args, samples=4)
    assert found.error.relative > 1e-3
    assert any("mixing" in layer.name for layer in found.layers if layer.begins)
    with use_branches(model, False):
        assert audit(model, made.args, samples=4).error.relative < 1e-9


# Today's stack.


def test_the_scheduler_of_upstream_takes_verbose() -> None:
    REPAIRS.apply(registry().adapter("schnetpack"), "cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.125


# What spktrain says.


def test_reading_the_command_line() -> None:
    told = {
        ("/bin/spktrain", "trainer.max_epochs=7", "+seed=1"): (7, "spktrain trainer.max_epochs"),
        ("spktrain", "trainer.max_epochs=7", "++trainer.max_epochs=9"): (9, "spktrain trainer.max_epochs"),
        ("spktrain", "experiment=md17"): (None, "the script's command line"),
        ("spktrain", "trainer.max_epochs=${epochs}"): (None, "the script's command line"),
    }
    for argv, expected in told.items():
        found = script(argv)
        assert found is not None
        assert (found.epochs, found.source, found.metrics) == (*expected, METRICS)
    assert script(("spkpredict", "trainer.max_epochs=7")) is None


def test_results_are_read_off_lightnings_table() -> None:
    reading = MetricReader(METRICS)
    for line in (
        "│      test_energy_mae      │   0.034906670451164246    │",
        "│      test_forces_mae      │    0.11477623134851456    │",
        "│     test_forces_rmse      │            nan            │",
        "         test_loss            2.3e-05",
    ):
        reading.feed(line, 0.0)
    found = {name: value for name, value in reading.values.items() if value == value}
    assert found == {"energy mae": 0.034906670451164246, "forces mae": 0.11477623134851456, "loss": 2.3e-05}


# spktrain itself, in processes of its own.

BY_HAND = """
import sys
from typing import TypeVar
import torch, torch.utils.data.dataloader as loader
loader.T_co = TypeVar("T_co")
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
def init(self, *args, verbose=None, plain=Plateau.__init__, **kwargs):
    plain(self, *args, **kwargs)
Plateau.__init__ = init
"""
"""Fixes for current torch and Lightning, without ACE. The environment decides whether whole checkpoints load."""
UNPATCHED = BY_HAND + "import schnetpack.cli\nschnetpack.cli.train()\n"
WITHOUT = (
    """
import json, sys
sys.modules["ace_plugins"] = sys.modules["ace_schnetpack"] = None  # as if they were not installed
"""
    + BY_HAND
    + """
from schnetpack import AtomisticTask
from schnetpack.utils import load_model
for path in sys.argv[1:]:
    try:
        if path.endswith(".ckpt"):
            model = AtomisticTask.load_from_checkpoint(path, weights_only=False).model
        elif path.endswith(".task"):
            model = torch.load(path, weights_only=False).model
        else:
            model = load_model(path, weights_only=False)
    except ImportError as error:
        print(json.dumps(str(error)))
        continue
    out, tensors = model.eval()(torch.load("atoms.pt")), len(model.state_dict())
    if path.endswith("best_model"):
        model.postprocessors = torch.nn.ModuleList()
        torch.jit.script(model)  # what spkdeploy does, for LAMMPS
    print(json.dumps([out["energy"].tolist(), out["forces"].tolist(), tensors]))
"""
)
WORDS = (
    "experiment=md17 data=custom run.experiment=springs data.num_train=12 data.num_val=4 data.num_test=4 "
    "data.batch_size=4 data.num_workers=0 data.distance_unit=Ang data.property_units={energy:eV,forces:eV/Ang} "
    "globals.cutoff=4.0 model.representation.n_atom_basis=8 model.representation.n_interactions=2 +seed=1 "
    "trainer.accelerator=cpu trainer.enable_model_summary=False +trainer.enable_progress_bar=False print_config=False"
)


class Runs:
    """A database of pairs on springs, and runs of spktrain on it, each made on first use."""

    def __init__(self, folder: Path) -> None:
        from ase import Atoms

        self.folder = folder
        self.told: dict[str, str] = {}
        database = ASEAtomsData.create(
            str(folder / "springs.db"), distance_unit="Ang", property_unit_dict={"energy": "eV", "forces": "eV/Ang"}
        )
        torch.manual_seed(0)
        for _ in range(20):
            pos = (1.2 * torch.cartesian_prod(*[torch.arange(2)] * 3)[:6] + 0.2 * torch.randn(6, 3)).double()
            pos.requires_grad_(True)
            lengths = (pos[:, None] - pos[None])[~torch.eye(len(pos), dtype=torch.bool)].norm(dim=-1)
            total = (lengths - 2).square().sum() / 20
            (gradient,) = torch.autograd.grad(total, pos)
            properties = {"energy": total.detach()[None].numpy(), "forces": -gradient.numpy()}
            database.add_system(Atoms("OHHCHH", positions=pos.detach().numpy()), **properties)
        torch.save(
            {name: value.float() if value.is_floating_point() else value for name, value in batch(4.0).items()},
            folder / "atoms.pt",
        )

    def process(self, *words: str | os.PathLike[str], **environment: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("ACE_")}
        env.update({"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONWARNINGS": "ignore", **environment})
        told: Any = {"cwd": self.folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(list(words), check=False, **told)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done

    def train(self, name: str, *settings: str, epochs: int = 5) -> str:
        """Train or resume in the folder of that name. Without settings the run is not patched."""
        words = [*WORDS.split(), f"data.datapath={self.folder}/springs.db", f"trainer.max_epochs={epochs}"]
        words += [f"run.path={self.folder}", f"run.id={name}"]
        if settings:
            run = [sys.executable, "-m", "ace_plugins", "run", "schnetpack", *settings, "--", "spktrain"]
            done = self.process(*run, *words)
        else:
            done = self.process(sys.executable, "-c", UNPATCHED, *words, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
        return done.stdout + done.stderr

    def __call__(self, name: str, *settings: str) -> Path:
        if name not in self.told:
            self.told[name] = self.train(name, *settings)
        return self.folder / name

    def without_ace(self, *paths: Path) -> list[Any]:
        """Return energies, forces and the number of tensors of saved models, or the loading error."""
        done = self.process(sys.executable, "-c", WITHOUT, *paths)
        return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '["']

    def export(self, path: Path, to: Path) -> str:
        command = [sys.executable, "-m", "ace_plugins", "export", path, "-o", to, "--trust"]
        return self.process(*command).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("schnetpack"))


def table(printed: str) -> list[tuple[str, str]]:
    return re.findall(r"│ +(test_\w+) +│ +(\S+) +│", printed)


def states(path: Path) -> Data:
    saved = torch.load(path, weights_only=False)
    kept = saved.state_dict() if isinstance(saved, nn.Module) else saved["state_dict"]
    return {name: value for name, value in kept.items() if isinstance(value, Tensor)}


def test_off_is_the_unpatched_training_bit_for_bit(runs: Runs) -> None:
    plain, off = runs("plain"), runs("off", "--mode", "off")
    assert len(table(runs.told["plain"])) == 5
    assert table(runs.told["off"]) == table(runs.told["plain"])
    for file in ("best_model", "checkpoints/last.ckpt"):
        one, two = states(plain / file), states(off / file)
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_strict_trains_lands_and_writes_models_for_plain_schnetpack(runs: Runs) -> None:
    place = runs("strict", "--mode", "strict")
    told = runs.told["strict"]
    assert "5 epochs (spktrain trainer.max_epochs)" in told
    assert "landed at step" in told
    assert table(told) != table(runs.told.get("plain") or runs.train("again"))
    (checkpoint,) = (place / "checkpoints").glob("epoch*.ckpt")
    for path in (checkpoint, place / "best_model.task"):
        runs.export(path, place / f"plain{path.suffix}")
    best, from_checkpoint, from_task = runs.without_ace(
        *(place / n for n in ("best_model", "plain.ckpt", "plain.task"))
    )
    assert best[2] == len(states(runs("plain") / "best_model"))
    assert best == from_task
    assert from_checkpoint[1:] == best[1:], "without the mean energy, which is added on deployment"
    attached = torch.load(place / "best_model.task", weights_only=False).model.eval()
    assert status(attached).landed
    assert attached(torch.load(runs.folder / "atoms.pt"))["energy"].tolist() == best[0], "strict deploys f_eq"


def test_averages_of_weights_in_checkpoints_are_exported_too(runs: Runs) -> None:
    place = runs("strict", "--mode", "strict")
    runs.export(place / "checkpoints" / "last.ckpt", place / "last_plain.ckpt")
    found, plain, before = (
        torch.load(path, weights_only=False)["callbacks"]["ExponentialMovingAverage"]["ema"]
        for path in (
            place / "last_plain.ckpt",
            runs("plain") / "checkpoints/last.ckpt",
            place / "checkpoints/last.ckpt",
        )
    )
    for name in ("shadow_params", "collected_params"):
        assert [each.shape for each in found[name]] == [each.shape for each in plain[name]]
        assert len(before[name]) > len(found[name])


def test_training_goes_on_from_its_last_checkpoint(runs: Runs) -> None:
    runs("strict", "--mode", "strict")
    told = runs.train("strict", "--mode", "strict", epochs=7)
    assert "Resuming from checkpoint" in told
    assert "attached to NeuralNetworkPotential" in told
    assert torch.load(runs.folder / "strict/checkpoints/last.ckpt", weights_only=False)["epoch"] == 6


def test_resilient_is_deployed_with_its_branches_or_without(runs: Runs) -> None:
    place = runs("resilient", "--mode", "resilient", "--spectral-norm")
    runs.export(place / "best_model", place / "plain_model")
    kept, plain = runs.without_ace(place / "best_model", place / "plain_model")
    assert "ace_plugins" in kept, "it loads where ace-plugins is installed"
    atoms = torch.load(runs.folder / "atoms.pt")
    model = torch.load(place / "best_model", weights_only=False).eval()
    assert model(dict(atoms))["energy"].tolist() != plain[0]
    with use_branches(model, False):
        assert model(dict(atoms))["energy"].tolist() == plain[0]


def test_models_that_cannot_be_relaxed_end_in_one_line(runs: Runs) -> None:
    words = [*WORDS.split(), f"data.datapath={runs.folder}/springs.db", f"run.path={runs.folder}", "run.id=schnet"]
    words += ["model/representation=schnet", "trainer.max_epochs=1"]
    run = [sys.executable, "-m", "ace_plugins", "run", "schnetpack", "--", "spktrain", *words]
    done = subprocess.run(run, cwd=runs.folder, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "SchNet only has scalar features" in done.stderr
