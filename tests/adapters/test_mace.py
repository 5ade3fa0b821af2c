"""The MACE adapter on the real mace-torch."""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of e3nn 0.4 and TorchScript, on the newest torch
    pytest.importorskip("mace", reason="needs mace-torch: pip install 'ace-mace[upstream]'")
    from mace.modules.models import MACE
    from mace.tools.scripts_utils import get_optimizer, get_params_options
    from torch_ema import ExponentialMovingAverage

import ace_plugins
from ace_mace import finishing
from ace_mace.example import small_example, small_model
from ace_mace.plugin import ace_layers, ace_script
from ace_plugins import adapter as ace
from ace_plugins import attach, averaged, equivariance_error, export, status, use_branches
from ace_plugins.compare.trial import MetricReader
from ace_plugins.errors import AceWarning, AdapterError, StepError
from ace_plugins.plugins.registry import registry
from ace_plugins.symmetry.measure import map_tensors
from ace_plugins.testing import parametrize_with_checks

pytestmark = pytest.mark.filterwarnings(
    "ignore:The TorchScript type system:UserWarning",
    "ignore:Environment variable TORCH_FORCE_NO:UserWarning",
    "ignore:.torch.jit:DeprecationWarning",
)
MODES = ("strict", "bounded", "resilient", "scheduled")
QUIET: dict[str, Any] = {"trace": False, "tell": False}


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """MACE's calculator sets the default dtype for the whole process."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@parametrize_with_checks("mace")
def test_contract(check: Any) -> None:
    check()


def double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def example(name: str = "ScaleShiftMACE", **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a model and a batch of a molecule and a crystal in float64."""
    made = small_example(0, name, **options)
    return made.model.double(), map_tensors(made.args[0], double)


def relaxed(mode: str, name: str = "ScaleShiftMACE", gamma: float = 0.5) -> tuple[Any, dict[str, Tensor]]:
    """Return a model with large gammas, whatever the mode starts with."""
    model, batch = example(name)
    attach(model, mode=mode, spectral_norm=mode in ("bounded", "resilient"), **QUIET)
    with torch.no_grad():
        model.ace.gamma.fill_(gamma)
        if mode == "scheduled":
            for weight in model.ace.branches.parameters():
                weight.mul_(1e3)
    return model, batch


def fresh(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the batch, since MACE writes into it."""
    return {key: value.detach().clone() for key, value in batch.items()}


def test_sites_and_how_the_group_acts_there() -> None:
    model, _ = example(hidden="8x0e + 8x1o", max_ell=2)
    first, last = ace_layers(model)
    assert isinstance(first, ace.Site)
    assert isinstance(last, ace.Site)
    assert (first.name, first.shape_in, first.shape_out) == ("products.0", (8, 9), (32,))
    assert (last.name, last.shape_in, last.shape_out) == ("products.1", (8, 9), (8,))
    assert first.acts == (ace.Irreps("0e+1o+2e"), ace.Irreps("8x0e+8x1o"))
    found = ace_plugins.audit(attach(model, **QUIET), (example()[1],))
    judged = {layer.name: layer for layer in found.layers if layer.known}
    assert {"products.0", "products.1"} <= judged.keys()
    assert max(judged[name].after or 0 for name in ("products.0", "products.1")) < 1e-9, "and acts so indeed"


@pytest.mark.parametrize("how", ["attached", "exported", "averaged"])
@pytest.mark.parametrize("mode", MODES)
def test_forces_are_the_gradient_of_the_energy(mode: str, how: str) -> None:
    model, batch = relaxed(mode)
    judged: nn.Module = model
    if how == "exported":
        judged, _ = example()
        with pytest.warns(AceWarning, match="export removes branches"):
            judged.load_state_dict(export(model.state_dict()), strict=True)
    elif how == "averaged":
        judged = averaged(model, samples=3)

    def energy(positions: Tensor) -> Tensor:
        out: Tensor = judged({**fresh(batch), "positions": positions}, compute_force=False)["energy"]
        return out.detach().sum()

    with use_branches(model, True):
        forces = judged(fresh(batch))["forces"].detach()
        with use_branches(model, False):
            without = judged(fresh(batch))["forces"]
        assert torch.allclose(forces, without, atol=1e-4) is (how == "exported"), "the branches count"
        directions = torch.randn(6, *forces.shape, dtype=torch.float64)
        step = 1e-4
        for each in directions / directions.flatten(1).norm(dim=1)[:, None, None]:
            there, back = (energy(batch["positions"] + sign * step * each) for sign in (1, -1))
            assert float((back - there) / (2 * step)) == pytest.approx(float((forces * each).sum()), abs=1e-6)
    net = torch.zeros(2, 3, dtype=torch.float64).index_add(0, batch["batch"], forces)
    assert float(net.abs().max()) < 1e-9


def test_stress_is_the_derivative_by_strain_of_a_crystal() -> None:
    model, batch = relaxed("resilient")
    cell = batch["cell"][3:]
    crystal = batch["batch"] == 1

    def energy(strain: Tensor) -> float:
        bent = fresh(batch)
        stretch = torch.eye(3, dtype=torch.float64) + strain
        bent["positions"] = torch.where(crystal[:, None], bent["positions"] @ stretch, bent["positions"])
        bent["cell"] = torch.cat([bent["cell"][:3], cell @ stretch])
        bent["shifts"] = torch.einsum("ei,eij->ej", bent["unit_shifts"], bent["cell"].view(2, 3, 3)[edges])
        return float(model(bent, compute_force=False)["energy"][1].detach())

    edges = batch["batch"][batch["edge_index"][0]]
    stress = model(fresh(batch), compute_stress=True)["stress"][1].detach()
    volume = float(torch.linalg.det(cell).abs())
    for _ in range(3):
        strain = torch.randn(3, 3, dtype=torch.float64)
        strain = (strain + strain.T) / strain.norm()
        slope = (energy(1e-4 * strain) - energy(-1e-4 * strain)) / 2e-4
        assert slope / volume == pytest.approx(float((stress * strain).sum()), abs=1e-6)


@pytest.mark.parametrize("name", ["MACE", "ScaleShiftMACE"])
def test_symmetry_is_broken_by_gamma_alone_and_translation_never(name: str) -> None:
    model, batch = relaxed("resilient", name)
    call = ace.Call((batch,), {"compute_stress": True})
    errors = []
    for gamma in (0.0, 0.1, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        errors.append(equivariance_error(model, call).absolute)
    assert errors[0] < 1e-9 < 1e-4 < errors[1] < errors[2]
    moved = {**batch, "positions": batch["positions"] + torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)}
    here, there = (model(fresh(data)) for data in (batch, moved))
    assert torch.allclose(here["energy"], there["energy"], atol=1e-9)
    assert torch.allclose(here["forces"], there["forces"], atol=1e-9)


def test_features_without_parity_are_turned_but_not_reflected() -> None:
    if "use_so3" not in inspect.signature(MACE).parameters:
        pytest.skip("this mace-torch has no use_so3")
    model, _ = example(use_so3=True, hidden="8x0e + 8x1e")
    action = registry().adapter("mace").call("ace_group_action", model=model)
    assert action.group is ace.SE3


def test_strict_evaluates_f_eq_although_mace_never_calls_eval() -> None:
    plain, batch = example()
    model = attach(copy.deepcopy(plain), mode="strict", frames="off", **QUIET)
    assert model.training
    expected = plain(fresh(batch))["energy"]
    assert torch.equal(model(fresh(batch))["energy"], expected)
    assert not torch.equal(model(fresh(batch), training=True)["energy"], expected)
    assert not torch.equal(model(fresh(batch), compute_force=False)["energy"], expected), "energies may be trained on"


def options(**more: Any) -> argparse.Namespace:
    """Return the parameters of the optimizer that MACE builds."""
    told: dict[str, Any] = {"lr": 0.01, "weight_decay": 5e-7, "amsgrad": True, "beta": 0.9, "optimizer": "adam"}
    return argparse.Namespace(**{**told, "lr_params_factors": "{}", "freeze": None, **more})


def test_gamma_is_adopted_by_an_optimizer_of_named_submodules_and_averaged_by_its_ema() -> None:
    model, batch = example()
    attach(model, mode="resilient", loop="paper", spectral_norm=True, **QUIET)
    optimizer = get_optimizer(options(), get_params_options(options(), model))
    (group,) = [group for group in optimizer.param_groups if any(p is model.ace.gamma for p in group["params"])]
    assert len(optimizer.param_groups) == len(get_params_options(options(), model)["params"])
    assert (group["lr"], group["amsgrad"]) == (0.01, True)
    ema = ExponentialMovingAverage(model.parameters(), decay=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(fresh(batch), training=True)["forces"].square().sum().backward()
        optimizer.step()
        ema.update()
    assert status(model).steps == 2
    state = copy.deepcopy(model.state_dict())
    with ema.average_parameters():
        assert not torch.equal(model.ace.gamma, state["ace.gamma"])
        within = model(fresh(batch))["energy"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not torch.equal(model(fresh(batch))["energy"], within)


def test_lbfgs_is_refused() -> None:
    model, batch = example()
    attach(model, **QUIET)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(StepError, match="LBFGS"):
        optimizer.step(lambda: model(fresh(batch), training=True)["energy"].sum())


@pytest.mark.parametrize("kernels", ["cueq", "oeq"])
def test_other_layouts_are_refused(kernels: str) -> None:
    model, _ = example()
    model.products[1].__dict__[f"{kernels}_config"] = argparse.Namespace(enabled=True)
    with pytest.raises(AdapterError, match=f"{kernels}_config.*--enable_{kernels}"):
        attach(model, **QUIET)
    assert not hasattr(model, "ace")


def test_the_end_of_training_takes_ace_off_unless_branches_are_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    for mode, stays in (("strict", False), ("scheduled", False), ("bounded", True), ("resilient", True)):
        model, batch = relaxed(mode)
        with use_branches(model, False):
            expected = model(fresh(batch))["energy"]
        finishing.finish(model)
        finishing.finish(model)  # a second time there is nothing to do
        assert hasattr(model, "ace") is stays
        if not stays:
            assert torch.equal(model(fresh(batch))["energy"], expected)
        assert ("ACE is removed" in capsys.readouterr().err) is not stays


def test_reading_the_command_line(tmp_path: Path) -> None:
    command = "/somewhere/bin/mace_run_train"
    config = tmp_path / "run.yaml"
    config.write_text("name: a\nmax_num_epochs: 30  # few\nlr: 0.01\n")
    told = {
        (command, "--max_num_epochs", "7"): (7, "mace_run_train --max_num_epochs"),
        (command, "--max_num_epochs=7", "--config", str(config)): (7, "mace_run_train --max_num_epochs"),
        (command, "--config", str(config)): (30, str(config)),
        (command, f"--config={config}"): (30, str(config)),
        (command, "--config", "missing.yaml"): (2048, "mace_run_train's default"),
        (command,): (2048, "mace_run_train's default"),
    }
    for argv, expected in told.items():
        found = ace_script(argv)
        assert found is not None
        assert (found.epochs, found.source, found.seed) == (*expected, "--seed")
    assert ace_script(("train.py", "--max_num_epochs", "7")) is None


TABLES = """\
2026-01-01 INFO: Epoch 11: head: Default, loss=0.02, MAE_E= 2468.69 meV, MAE_F=   81.44 meV / A
|  config_type  | MAE E / meV | MAE F / meV / A | relative F MAE % |
| train_Default |       71.3  |         60.2    |         7.33     |
| valid_Default |       72.3  |         61.2    |         7.53     |
|   config_type   | MAE E / meV | MAE F / meV / A | relative F MAE % |
| 300K_MD_Default |       64.5  |         62.6    |         7.86     |
"""


def test_how_results_are_printed() -> None:
    found = ace_script(("mace_run_train",))
    assert found is not None
    reading = MetricReader(found.metrics)
    for line in TABLES.splitlines():
        reading.feed(line, 0.0)
    assert reading.values == {
        "test force": 62.6, "test energy": 64.5, "validation force": 81.44, "validation energy": 2468.69,
    }  # fmt: skip


def test_batches_are_made_for_trained_models() -> None:
    model = small_model(atomic_numbers=[3, 17], num_elements=2, atomic_energies=[0.0, 1.0], r_max=5.0)
    made = registry().adapter("mace").example(0, model)
    assert made.model is model
    found = ace_plugins.audit(model, ace.Call(made.args, made.kwargs), samples=2)
    assert found.verdict == "symmetric"
    assert "data.cell" not in found.uncovered
    assert bool(made.args[0]["unit_shifts"].any()), "a crystal is among them"


def test_the_version_range_is_read_from_metadata() -> None:
    (needs,) = [r for r in registry().adapter("mace").requires if r.upstream]
    assert needs.requirement.startswith("mace-torch")
    assert needs.met


# MACE's own command, in processes of its own.


COMMAND = (
    "--name t --seed 1 --train_file train.xyz --valid_fraction 0.25 --test_file test.xyz --E0s average "
    "--energy_key energy --forces_key forces --model MACE --hidden_irreps 4x0e+4x1o --max_ell 1 --correlation 2 "
    "--r_max 3.0 --num_radial_basis 3 --MLP_irreps 4x0e --batch_size 2 --valid_batch_size 4 --ema --ema_decay 0.9 "
    "--amsgrad --device cpu --default_dtype float64 --error_table TotalMAE --swa --start_swa 2 --max_num_epochs 4"
)


def write_structures(path: Path, count: int) -> None:
    """Write random water molecules with invented energies and forces."""
    lines = []
    for _ in range(count):
        positions = torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.76, -0.5], [0.0, -0.76, -0.5]]) + 0.1 * torch.randn(3, 3)
        energy = -10.0 + float(positions.square().sum())
        lines += ["3", f'Properties=species:S:1:pos:R:3:forces:R:3 energy={energy} pbc="F F F"']
        lines += [
            " ".join([kind, *(f"{x:.6f}" for x in (*place, *(-2 * place)))])
            for kind, place in zip("OHH", positions, strict=True)
        ]
    path.write_text("\n".join(lines) + "\n")


class Runs:
    """Runs of the command, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, str] = {}
        torch.manual_seed(0)
        write_structures(folder / "train.xyz", 8)
        write_structures(folder / "test.xyz", 4)

    def __call__(self, name: str, *settings: str) -> Path:
        """Return the working folder of a run. Without settings the run is not patched."""
        place = self.folder / name
        if name not in self.told:
            command = str(Path(sys.executable).with_name("mace_run_train"))
            words = [*COMMAND.split(), "--work_dir", str(place)]
            patch = [sys.executable, "-m", "ace_plugins", "run", "mace", *settings, "--", command] if settings else None
            done = subprocess.run(
                [*(patch or [sys.executable, command]), *words],
                cwd=self.folder,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            self.told[name] = done.stdout + done.stderr
        return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("mace"))


def losses(place: Path) -> list[dict[str, Any]]:
    """Return all numbers that MACE writes for steps and evaluations, except times."""
    lines = (place / "results" / "t_run-1_train.txt").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def test_off_is_the_unpatched_run(runs: Runs) -> None:
    plain, off = runs("plain"), runs("off", "--mode", "off")
    assert losses(off) == losses(plain)
    one, two = (torch.load(place / "t_stagetwo.model", weights_only=False).state_dict() for place in (plain, off))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


WITHOUT = """
import json, sys
sys.modules["ace_plugins"] = sys.modules["ace_mace"] = None  # as if they were not installed
import torch, ase.io
from mace.calculators import MACECalculator
atoms = ase.io.read("test.xyz", index=0)
told = {}
for path in sys.argv[1:]:
    try:
        if "compiled" in path:
            told[path] = sum(p.numel() for p in torch.jit.load(path).parameters())
            continue
        atoms.calc = MACECalculator(model_paths=path, device="cpu")
        told[path] = [atoms.get_potential_energy(), atoms.get_forces().tolist(), len(atoms.calc.models[0].state_dict())]
    except ImportError as error:
        told[path] = str(error)
print(json.dumps(told))
"""


def load_without_ace(folder: Path, *paths: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, *map(str, paths)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "ACE_RUN"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]).values())


def test_what_strict_training_writes_loads_in_plain_mace(runs: Runs) -> None:
    """With EMA, AMSGrad and two stages, the files load in the ASE calculator and as TorchScript without ACE."""
    place = runs("strict", "--mode", "strict")
    told = runs.told["strict"]
    assert "ACE is removed" in told
    assert "landed at step" in told
    assert losses(place) != losses(runs("plain"))
    names = [f"t{stage}{kind}.model" for stage in ("", "_stagetwo") for kind in ("", "_compiled")]
    saved = sorted(
        (place / "checkpoints").glob("*.pt"), key=lambda path: int(path.stem.split("epoch-")[1].split("_")[0])
    )
    first, compiled, second, second_compiled = load_without_ace(runs.folder, *(place / name for name in names))
    plain = torch.load(runs("plain") / "t.model", weights_only=False)
    for (energy, forces, entries), checkpoint in ((first, saved[0]), (second, saved[-1])):
        assert entries == len(plain.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)  # of a gamma that its EMA has not let go of
            plain.load_state_dict(export(checkpoint)["model"], strict=True)
        assert energy == pytest.approx(energy_of(plain, runs.folder), abs=1e-9), "f_eq of the best checkpoint"
        assert float(torch.tensor(forces, dtype=torch.float64).sum(0).abs().max()) < 1e-9
    assert compiled == second_compiled == sum(p.numel() for p in plain.parameters())


def energy_of(model: nn.Module, folder: Path) -> float:
    import ase.io
    from mace.calculators import MACECalculator

    atoms = ase.io.read(folder / "test.xyz", index=0)
    atoms.calc = MACECalculator(models=model, device="cpu")
    return float(atoms.get_potential_energy())


def test_what_resilient_training_writes_keeps_its_branches(runs: Runs, tmp_path: Path) -> None:
    place = runs("resilient", "--mode", "resilient")
    assert "deploys the branches" in runs.told["resilient"]
    assert not (place / "t_compiled.model").exists(), "as people are told"
    whole = torch.load(place / "t.model", weights_only=False)
    assert float(whole.ace.gamma.detach().abs().max()) > 0
    plain = tmp_path / "plain.model"
    with pytest.warns(AceWarning, match="export removes branches"):
        export(place / "t.model", plain, trust=True)
    refused, (energy, _, _) = load_without_ace(runs.folder, place / "t.model", plain)
    assert "ace_plugins" in refused
    with_branches = energy_of(whole, runs.folder)
    with use_branches(whole, False):
        assert energy == pytest.approx(energy_of(whole, runs.folder), abs=1e-9)
    assert with_branches != pytest.approx(energy, abs=1e-6)


def test_plain_mace_loads_the_weights_of_an_exported_checkpoint(runs: Runs) -> None:
    """The optimizer state still has ACE's parameters, and a warning mentions it."""
    place = runs("resilient", "--mode", "resilient")
    (checkpoint,) = (place / "checkpoints").glob("*_swa.pt")
    with pytest.warns(AceWarning) as caught:
        plain = export(checkpoint)
    assert any("not the optimizer state" in str(each.message) for each in caught)
    model = torch.load(runs("plain") / "t.model", weights_only=False)
    model.load_state_dict(plain["model"], strict=True)
