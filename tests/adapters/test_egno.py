"""The EGNO adapter: on the miniature, and on the real upstream if ACE_UPSTREAM_EGNO names a checkout."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from clones import (
    Answers,
    ace,
    ask,
    assert_commit_is_known,
    assert_healthy,
    assert_revert_is_whole,
    assert_same_layout,
    fresh,
    git,
    given,
    miniature,
    python,
    real,
)
from motion import write_motion

np = pytest.importorskip("numpy", reason="needs numpy: pip install 'ace-egno[upstream]'")

from ace_egno.upstream import CHECKOUT
from ace_plugins import read_trace

PAPER = {"nf": 128, "n_layers": 6}
SMALL = {"nf": 8, "n_layers": 2}
TRAIN = {
    "exp_name": "exp",
    "batch_size": 12,
    "epochs": 2,
    "seed": 1,
    "lr": 5e-4,
    "max_training_samples": 25,
    "test_interval": 2,
    "weight_decay": 1e-10,
    "delta_frame": 30,
    "data_dir": "motion/dataset",
    "case": "run",
    "num_timesteps": 5,
    "time_emb_dim": 32,
    "num_modes": 2,
}


@pytest.fixture(scope="module", params=[miniature, real], ids=["miniature", "real"])
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real checkout has its own data."""
    root: Path = request.param("egno", tmp_path_factory.mktemp("egno"))
    if not (root / "motion" / "dataset" / "motion_run.pkl").is_file():
        write_motion(root / "motion" / "dataset")
    return root


@pytest.fixture
def root(checkout: Path) -> Path:
    return fresh(checkout)


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    root = miniature("egno", tmp_path)
    write_motion(root / "motion" / "dataset")
    return root


def patched(root: Path, *arguments: str) -> Path:
    done = ace(root, "egno", *arguments)
    assert done.returncode == 0, done.stderr
    return root


def configured(root: Path, **settings: Any) -> list[str]:
    """Run the script as in upstream's README, with the settings in a file."""
    path = root / "exp_results" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**TRAIN, **settings}))
    return ["main_mocap_no.py", "--config_by_file", "exp_results/config.json", "--outf", "exp_results"]


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.search(r"loss|best_", line)]


PLAIN = """
    import sys, warnings; warnings.simplefilter("ignore")
    import torch
    from model.egno import EGNO
    assert not any(name.startswith("ace") for name in sys.modules)
    for path in sys.argv[1:]:
        model = EGNO(n_layers=6, in_node_nf=2, in_edge_nf=2, hidden_nf=128, with_v=True, num_timesteps=5)
        try:
            model.load_state_dict(torch.load(path, weights_only=True), strict=True)
            print("loaded")
        except RuntimeError as error:
            print("Unexpected key(s) in state_dict" in str(error))
"""


def test_the_script_of_a_patched_checkout_trains_with_ace_and_plain_upstream_loads_what_it_saves(
    root: Path, tmp_path: Path
) -> None:
    patched(root, "--mode", "resilient", "--error-every", "100")
    done = python(root, *configured(root, **PAPER))
    assert done.returncode == 0, done.stderr
    assert len([line for line in losses(done.stdout) if line.startswith("train epoch")]) == 2
    banner = re.search(r"^ace: egno .*$", done.stderr, re.MULTILINE)
    assert banner is not None, done.stderr
    for part in ("12 sites", "1,192,684 parameters + 112,078 of ACE", "mode resilient", "budget auto"):
        assert part in banner[0]
    assert "quiet_autocast" in banner[0]
    told = "ace: budget: 4 steps: 2 epochs (exp_results/config.json) of 2 steps\n"
    assert told in done.stderr
    assert "FutureWarning" not in done.stderr
    assert re.search(r"ACE resilient, 4 of 4 steps, trace in \.ace/runs/", done.stderr)
    assert re.search(r"equivariance error under SE\(3\), with branches, relative: \d\.\d+ at step 1\n", done.stderr)
    assert "layers.5.x" in done.stderr
    assert "layers.5.h" in done.stderr
    assert "without spectral_norm" not in done.stderr
    (run,) = (root / ".ace" / "runs").iterdir()
    assert read_trace(run)[0]["error"]["group"] == "SE(3)"
    changed = git(root, "status", "--porcelain").split()
    assert {name for name in changed if name.endswith((".py", ".toml"))} == {*CHECKOUT.scripts, "ace.toml"}

    saved, exported = root / "exp_results" / "exp" / "saved_model.pth", tmp_path / "plain.pth"
    done = ace(root, "export", str(saved), "-o", str(exported))
    assert done.returncode == 0, done.stderr
    assert "branches with |gamma| up to" in done.stderr, "resilient branches still count"
    done = python(fresh(root), "-c", textwrap.dedent(PLAIN), str(saved), str(exported))
    assert done.stdout.split() == ["True", "loaded"], done.stderr


def test_off_is_the_plain_script_bit_for_bit(root: Path, tmp_path: Path) -> None:
    run = configured(root, **SMALL)
    # What the plain script needs of numpy 1.
    (tmp_path / "sitecustomize.py").write_text("import numpy\nnumpy.Inf = numpy.inf\n")
    plain = python(root, *run, PYTHONPATH=str(tmp_path))
    assert plain.returncode == 0, plain.stderr
    patched(root, "--mode", "off")
    off = python(root, *run)
    assert off.returncode == 0, off.stderr
    assert off.stdout == plain.stdout
    assert len(losses(off.stdout)) >= 6
    assert not (root / ".ace").exists()


def test_patch_and_revert_leave_git_as_it_was(root: Path) -> None:
    assert_revert_is_whole(root, "egno")


# Answered by one process.


def shims() -> list[bool]:
    import warnings

    import numpy
    import torch

    from ace_plugins import patched

    if hasattr(numpy, "Inf"):
        del numpy.Inf
    with patched("egno", shims=False):
        import model.egno
    told = [hasattr(numpy, "Inf")]
    warnings.simplefilter("error")
    with patched("egno"):
        import model.layer_no  # noqa: F401
    told.append(float("inf") == numpy.Inf)
    with torch.cuda.amp.autocast(enabled=False):
        pass
    try:
        warnings.warn("another", FutureWarning, stacklevel=1)
    except FutureWarning:
        told.append(True)
    warnings.simplefilter("ignore")
    return told


def configurations() -> dict[str, int]:
    """The models of the other scripts, called by position and with edges as lists."""
    import torch
    from model.egno import EGNO
    from torch import nn

    from ace_plugins import patched, status

    made = {
        "simulation": {
            "n_layers": 4,
            "in_node_nf": 1,
            "in_edge_nf": 2,
            "hidden_nf": 64,
            "norm": True,
            "num_timesteps": 5,
        },
        "md17": {
            "n_layers": 5,
            "in_node_nf": 2,
            "in_edge_nf": 5,
            "hidden_nf": 64,
            "use_time_conv": False,
            "num_timesteps": 8,
        },
        "mdanalysis": {
            "n_layers": 4,
            "in_node_nf": 2,
            "in_edge_nf": 2,
            "hidden_nf": 128,
            "flat": True,
            "num_timesteps": 4,
        },
    }
    counts = {}
    for name, options in made.items():
        with patched("egno", trace=False):
            model = EGNO(**options, activation=nn.SiLU(), device=torch.device("cpu"), with_v=True)
        optimizer = torch.optim.Adam(model.parameters())
        edges = torch.combinations(torch.arange(6)).T
        x, v, h = torch.randn(6, 3), torch.randn(6, 3), torch.randn(6, options["in_node_nf"])
        fea = torch.randn(edges.shape[1], options["in_edge_nf"])
        out, _, _ = model(x, h, [edges[0], edges[1]], fea, v, loc_mean=x.mean(0).expand(6, 3))
        out.square().mean().backward()
        optimizer.step()
        now = status(model)
        assert len(now.sites) == 2 * options["n_layers"], now
        assert now.steps == 1
        counts[name] = now.ace_parameters
    return counts


def doctor() -> Any:
    from click.testing import CliRunner

    from ace_plugins.cli.main import cli

    return json.loads(CliRunner().invoke(cli, ["doctor", "egno", "--json"], catch_exceptions=False).stdout)


@pytest.fixture(scope="module")
def answers(checkout: Path) -> Answers:
    return ask(fresh(checkout), shims, configurations, doctor)


def test_the_shims_do_what_is_missing_and_can_be_left_out(answers: Answers) -> None:
    assert answers(shims) == [False, True, True]


def test_the_other_scripts_configurations(answers: Answers) -> None:
    sizes = {"simulation": (64, 33, 4), "md17": (64, 34, 5), "mdanalysis": (128, 34, 4)}
    for name, found in answers(configurations).items():
        width, lifted, layers = sizes.pop(name)
        h = (lifted + 1) * width + layers * (2 * width + (width + 1) * width)
        x = 12 + layers * (6 + 4 * width + 2 * width + 3 * width + 3)
        assert found == h + x + 2 * layers, name
    assert not sizes


def test_doctor_measures_the_symmetry(answers: Answers) -> None:
    assert_healthy(answers(doctor), 1_192_684, 1_304_762)


# The other scripts.


def test_simulated_particles(root: Path) -> None:
    nbody = pytest.importorskip("ace_segnn.data.nbody", reason="needs ace-segnn, which makes the data")
    folder = root / "simulation" / "dataset" / "simple"
    folder.mkdir(parents=True, exist_ok=True)
    nbody.generate(folder, train=20, valid=10, test=10)
    patched(root)
    config = {**TRAIN, "model": "egno", "data_dir": "simulation/dataset", "batch_size": 10, **SMALL}
    (root / "config.json").write_text(json.dumps(config))
    done = python(root, "main_simulation_simple_no.py", "--config_by_file", "config.json", "--outf", "exp_results")
    assert done.returncode == 0, done.stderr
    assert "attached to EGNO, 4 sites" in done.stderr
    assert "ACE auto" in done.stderr


def with_molecule(root: Path, folder: str, name: str) -> list[str]:
    """Write data for a script that in reality needs a GPU or MDAnalysis, and return its options."""
    moves = np.random.normal(size=(8, 3)) + 0.02 * np.random.normal(size=(200, 8, 3)).cumsum(0)
    (root / folder / "dataset").mkdir(exist_ok=True)
    np.savez(root / folder / "dataset" / name, R=moves, z=np.arange(1, 9), charges=np.linspace(-1, 1, 8))
    options = "--nf 8 --n_layers 2 --epochs 1 --max_training_samples 20 --batch_size 10 --test_interval 1"
    return [f"main_{folder}_no.py", *options.split()]


def test_molecules_with_torchrun(mini: Path) -> None:
    """Both processes run the script; only the first one reports."""
    script = with_molecule(patched(mini), "md17", "md17_aspirin.npz")
    rendezvous = ("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "--local_addr=127.0.0.1")
    done = python(mini, "-m", "torch.distributed.run", "--nproc_per_node=2", *rendezvous, *script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train epoch 0") == 2, "wherever in a line: two processes print at once"
    assert done.stderr.count("attached to EGNO, 4 sites") == 1
    assert done.stderr.count("ACE auto") == 1


def test_proteins_with_branches_that_are_not_bounded(mini: Path) -> None:
    """Resilient mode deploys the branches, and all reports of the settings say so."""
    told = "warning: mode 'resilient' without spectral_norm: the branches stay in the deployed model"
    strict = ace(mini, "egno", "--no-spectral-norm", "--mode", "strict")
    assert "without spectral_norm" not in strict.stdout + strict.stderr
    done = ace(mini, "egno", "--no-spectral-norm", "--mode", "resilient")
    assert told in " ".join(done.stdout.split())
    assert told in " ".join(ace(mini, "status").stdout.split())
    assert "a branch can grow" in json.loads(ace(mini, "status", "--json").stdout)["warnings"][0]
    done = python(mini, *with_molecule(mini, "mdanalysis", "adk.npz"))
    assert done.returncode == 0, done.stderr
    assert "ace: mode 'resilient' without spectral_norm: " in done.stderr
    assert "attached to EGNO, 4 sites" in done.stderr
    assert "ACE resilient, 2 steps" in done.stderr


# What resilient mode shows.


def test_the_equivariance_error_falls_to_what_the_data_is_worth(mini: Path) -> None:
    """The motion has a preferred direction. With a low rho the branches stay, with a high one they vanish."""
    last = {}
    for rho in (1, 100):
        patched(mini, "--mode", "resilient", "--error-every", "20", "--gamma-init", "1", f"--rho={rho}x")
        done = python(mini, *configured(mini, **SMALL, lr=5e-3, epochs=120, test_interval=119), ACE_RUNS=f"runs{rho}")
        assert done.returncode == 0, done.stderr
        (folder,) = (mini / f"runs{rho}").iterdir()
        errors = [line["error"]["relative"] for line in read_trace(folder) if "error" in line]
        assert len(errors) == 13
        last[rho] = errors[-1]
    assert last[100] < 0.2 * errors[0]
    assert last[1] > 5 * last[100]


def test_settings_that_make_no_sense(mini: Path) -> None:
    refused = ace(mini, "egno", "--rho=0")
    told = "rho 0.0: expected a finite number above 0"
    assert refused.returncode == 2
    assert told in refused.stderr
    assert git(mini, "status", "--porcelain") == "", "nothing was changed"
    with (patched(mini) / "ace.toml").open("a") as file:
        file.write("rho = 0.0\n")
    done = python(mini, *configured(mini, **SMALL))
    assert done.returncode == 2
    assert re.search(rf"ace\.toml line \d+: {re.escape(told)}", done.stderr)
    assert "Traceback" not in refused.stderr + done.stderr


# The real upstream alone.


def test_the_pinned_commit_is_known() -> None:
    assert_commit_is_known("egno", CHECKOUT)


def layout() -> dict[str, Any]:
    import inspect

    from model import basic, egno, layer_no

    from ace_egno.example import mocap_model

    def names(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [f"{p.name}{'' if p.default is p.empty else '=...'}" for p in parameters]

    def shapes(**options: Any) -> list[Any]:
        return [[k, list(v.shape)] for k, v in mocap_model(**options).state_dict().items()]

    small = {"hidden_nf": 8, "n_layers": 2}
    out: dict[str, Any] = {
        "mocap": shapes(),
        "flat": shapes(flat=True, **small),
        "without time": shapes(use_time_conv=False, **small),
        "modes": shapes(num_modes=3, time_emb_dim=16, in_edge_nf=5, **small),
        "embedding": names(layer_no.get_timestep_embedding),
        "aggregate": names(basic.aggregate),
    }
    networks = (basic.BaseMLP, basic.InvariantScalarNet, basic.EGNN_Layer, basic.EGNN, egno.EGNO)
    for cls in (*networks, layer_no.SpectralConv1d, layer_no.TimeConv, layer_no.TimeConv_x):
        for method in ("__init__", "forward"):
            out[f"{cls.__module__}.{cls.__name__}.{method}"] = names(getattr(cls, method))
    return out


def test_the_miniature_has_the_real_ones_names_signatures_and_shapes(mini: Path) -> None:
    assert_same_layout(mini, "egno", layout)


# Beside the authors' own code.

COMMON = """
    import sys, warnings; warnings.simplefilter("ignore")
    from argparse import Namespace
    import torch
    STEPS = 10
    def build(cls):
        return cls(n_layers=6, in_node_nf=2, in_edge_nf=2, hidden_nf=128, with_v=True, num_timesteps=5, num_modes=2)
    folder = sys.argv.pop(1)
    import main_mocap_no as script
    script.args = Namespace(model="egno", num_timesteps=5)
    class Loader(list):
        partition = "train"
        dataset = property(lambda self: self)
"""
AUTHORS = """
    from model.egno import EGNO
    from motion.dataset import MotionDynamicsDataset
    torch.manual_seed(3)
    model = build(EGNO)
    data = MotionDynamicsDataset("train", max_samples=200, delta_frame=30, data_dir=folder, case="run", num_timesteps=5)
    batches = list(torch.utils.data.DataLoader(data, batch_size=12, shuffle=True))[:STEPS]
    # Both begin with vectors that have converged: five iterations a forward here, one a step there.
    for module in model.modules():
        if torch.nn.utils.parametrize.is_parametrized(module, "weight"):
            module.parametrizations.weight[0]._power_method(module.parametrizations.weight.original, 2000)
    torch.save([model.state_dict(), batches], f"{folder}/start.pt")
    gammas = model.get_gammas()
    lambdas = [torch.zeros(()) for _ in gammas]
    optimizer, dual = torch.optim.Adam(model.parameters(), lr=5e-4), torch.optim.Adam(lambdas, lr=2e-4)
    # The authors clip gradients, which upstream's script does not.
    torch.nn.utils.clip_grad_norm_ = lambda *_: None
    args = Namespace(model="egno", num_timesteps=5, resilience=0, epsilon=0, auglag_const=0.0, gamma=1)
    history = []
    for step in range(STEPS):
        loss, *_ = script.train_epoch(model, optimizer, dual, lambdas, step, Loader([batches[step]]), args,
                                      constrained=True, disable_equivariance=True)
        history.append([loss, torch.stack(list(gammas)).tolist(), torch.stack(lambdas).tolist()])
    torch.save(history, f"{folder}/theirs.pt")
"""
OURS = """
    from model.egno import EGNO
    model = build(EGNO)
    start, batches = torch.load(f"{folder}/start.pt")
    state = model.state_dict()
    for name, value in start.items():
        words = name.split(".")
        if words[0].startswith("pos_linear_"):
            name = f"ace.branches.lift_{words[0][-1]}.{words[1]}"
        elif words[0].startswith("pos_interactions_"):
            if words[-1] in ("_u", "_v", "num_batches_tracked"):
                continue
            name = f"ace.branches.layers_{words[1]}_{words[0][-1]}.{words[2]}."
            name += "weight" if words[-1] == "original" else words[-1]
        elif words[0].startswith("gammas_"):
            state["ace.gamma"][2 * int(words[1]) + "xh".index(words[0][-1])] = value
            continue
        assert state[name].shape == value.shape, name
        state[name] = value
    # A part of a checkpoint: without directions they are worked out anew.
    for name in [name for name in state if name.endswith((".direction", "ace.manifest"))]:
        del state[name]
    model.load_state_dict(state, strict=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    history = []
    for step in range(STEPS):
        loss, _ = script.train(model, optimizer, step, Loader([batches[step]]))
        order = [*range(1, 12, 2), *range(0, 12, 2)]
        history.append([loss, model.ace.gamma[order].tolist(), model.ace.duals.lambda_[order].tolist()])
    torch.save(history, f"{folder}/ours.pt")
"""


def test_ten_steps_are_the_authors_own(tmp_path: Path) -> None:
    """Compare strict mode. The authors' resilient mode is another algorithm: u is lambda of the previous epoch."""
    authors = given("ace") / "EGNO"
    root = patched(real("egno", tmp_path), "--mode", "strict", "--preset", "paper")
    for name in ("motion_run.pkl", "split_run.pkl"):
        shutil.copy(root / "motion" / "dataset" / name, tmp_path)
    extra = tmp_path / "extra"
    (extra / "pytorch3d").mkdir(parents=True)
    (extra / "wandb.py").write_text("")
    (extra / "pytorch3d" / "__init__.py").write_text("")
    (extra / "pytorch3d" / "transforms.py").write_text("Rotate = random_rotations = None\n")
    theirs = python(
        authors,
        "-c",
        textwrap.dedent(COMMON + AUTHORS),
        str(tmp_path),
        "--outf",
        str(tmp_path),
        PYTHONPATH=str(extra),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert theirs.returncode == 0, theirs.stderr
    (root / "ten.py").write_text("import ace_plugins.activate\n" + textwrap.dedent(COMMON + OURS))
    ours = python(root, "ten.py", str(tmp_path), "--outf", str(tmp_path))
    assert ours.returncode == 0, ours.stderr
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("theirs", "ours"))
    assert len(one) == len(two) == 10
    for (loss, gamma, lambda_), (my_loss, my_gamma, my_lambda) in zip(one, two, strict=True):
        assert my_loss == pytest.approx(loss, rel=1e-4)
        assert my_gamma == pytest.approx(gamma, abs=1e-4)
        assert my_lambda == pytest.approx(lambda_, abs=1e-5)
    assert abs(one[-1][2][0]) > 1e-3, "lambda moved"
