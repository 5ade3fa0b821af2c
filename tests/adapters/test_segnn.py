"""The SEGNN adapter: on the miniature, and on the real upstream if ACE_UPSTREAM_SEGNN names a checkout."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from importlib.util import find_spec
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

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'ace-segnn[upstream]'")
pytest.importorskip("e3nn", reason="needs e3nn: pip install 'ace-segnn[upstream]'")

from ace_segnn.data import nbody
from ace_segnn.upstream import CHECKOUT

TRAIN = "--dataset=nbody --epochs=2 --max_samples=20 --batch_size=10 --test_interval=1 --lr=0.001".split()
MODEL = "--lmax_h=1 --lmax_attr=1 --norm=none".split()
PAPER = [*TRAIN, *MODEL, "--model=segnn", "--layers=4", "--hidden_features=64"]
SMALL = [*TRAIN, *MODEL, "--model=segnn", "--layers=1", "--hidden_features=16"]


@pytest.fixture(scope="module", params=[miniature, real], ids=["miniature", "real"])
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = request.param("segnn", tmp_path_factory.mktemp("segnn"))
    nbody.generate(root / "nbody" / "dataset", train=20, valid=10, test=10, overwrite=True)
    return root


@pytest.fixture
def root(checkout: Path) -> Path:
    return fresh(checkout)


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    return miniature("segnn", tmp_path)


def patched(root: Path, *arguments: str) -> Path:
    done = ace(root, "segnn", *arguments)
    assert done.returncode == 0, done.stderr
    return root


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if re.search(r"loss|MAE|Best", line)]


def stand_ins(folder: Path) -> str:
    """Provide packages that the unpatched script needs and this environment may lack."""
    folder.mkdir()
    (folder / "wandb.py").write_text("")
    # Imported late: PyTorch Geometric itself looks for this module while it is being imported.
    (folder / "torch_scatter.py").write_text(
        "def scatter(*args, **kwargs):\n"
        "    from torch_geometric.utils import scatter\n"
        "    return scatter(*args, **kwargs)\n"
    )
    return str(folder)


def test_the_script_of_a_patched_checkout_trains_with_ace(root: Path) -> None:
    patched(root)
    done = python(root, "main.py", *PAPER)
    assert done.returncode == 0, done.stderr
    assert "The model has 937,960 parameters." in done.stdout
    assert len([line for line in losses(done.stdout) if line.startswith("train epoch")]) == 2
    assert "ace: " not in done.stdout, "stdout is the script's"
    banner = re.search(r"^ace: segnn .*$", done.stderr, re.MULTILINE)
    assert banner is not None, done.stderr
    for part in ("8 sites", "147,424 parameters + 790,536 of ACE", "mode auto", "budget auto", "at commit"):
        assert part in banner[0]
    assert "shims: torch_scatter, wandb" in banner[0] or find_spec("torch_scatter") is not None
    assert re.search(r"ACE auto, landed at step 3, \d+ of \d+ steps, trace in \.ace/runs/", done.stderr)
    assert "layers.3.update_layer_2" in done.stderr
    changed = git(root, "status", "--porcelain", "main.py", "ace.toml", ".ace")
    assert changed.split() == ["M", "main.py", "??", "ace.toml"]


def test_off_is_the_plain_script_bit_for_bit(root: Path, tmp_path: Path) -> None:
    plain = python(root, "main.py", *SMALL, PYTHONPATH=stand_ins(tmp_path / "extra"))
    assert plain.returncode == 0, plain.stderr
    patched(root, "--mode", "off")
    off = python(root, "main.py", *SMALL)
    assert off.returncode == 0, off.stderr
    assert off.stdout == plain.stdout
    assert len(losses(off.stdout)) >= 6
    assert not (root / ".ace").exists()


def test_compare_reads_the_results_that_the_script_prints(root: Path) -> None:
    done = ace(root, "compare", "segnn", "--runs", "off", "--seeds", "1", "--json", "--", "main.py", *SMALL)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [metric["name"] for metric in told["metrics"]] == ["test", "validation"]
    (result,) = Path(told["folder"]).glob("off-*/seed-1/result.json")
    result = json.loads(result.read_text())
    for name in ("test", "validation"):
        curve = [value for _, value in result["curves"][name]]
        assert len(curve) == 2, "one evaluation for each epoch"
        assert result["metrics"][name] in curve


def test_compare_reads_the_results_of_qm9(mini: Path) -> None:
    words = ["main.py", "--dataset=qm9", "--epochs=2", *MODEL, "--layers=1", "--hidden_features=8", "--batch_size=32"]
    done = ace(mini, "compare", "segnn", "--runs", "off", "--seeds", "1", "--json", "--", *words)
    assert done.returncode == 0, done.stderr
    (result,) = Path(json.loads(done.stdout)["folder"]).glob("off-*/seed-1/result.json")
    curves = json.loads(result.read_text())["curves"]
    assert (len(curves["test"]), len(curves["validation"])) == (1, 2)


def test_patch_and_revert_leave_git_as_it_was(root: Path) -> None:
    assert_revert_is_whole(root, "segnn")


# Answered by one process.


def shims() -> None:
    import sys

    import torch
    from torch_geometric.data import Data

    for cls in Data.__mro__:
        if "contains_isolated_nodes" in vars(cls):
            delattr(cls, "contains_isolated_nodes")
    import torch_geometric.typing as typing

    from ace_plugins import patched

    with patched("segnn"):
        import models.segnn.segnn  # noqa: F401
        import nbody.train_nbody as upstream

    assert Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3).contains_isolated_nodes() is True
    src, index = torch.rand(6, 2, dtype=torch.float64), torch.tensor([0, 2, 0, 2, 2, 0])
    for reduce in ("mean", "sum", "add"):
        out = upstream.scatter(src, index, dim=0, reduce=reduce)
        for i in range(3):
            rows = src[index == i]
            wanted = rows.mean(0) if reduce == "mean" and len(rows) else rows.sum(0)
            assert torch.allclose(out[i], wanted), (reduce, i)
    assert not typing.WITH_TORCH_SCATTER or "stand-in" not in str(sys.modules["torch_scatter"].__spec__.origin)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.zeros(1)], 1.0), [1], verbose=True)
    scheduler.optimizer.step()
    scheduler.step()
    assert abs(scheduler.get_last_lr()[0] - 0.1) < 1e-9


def qm9() -> list[int]:
    from e3nn.o3 import Irreps
    from models.balanced_irreps import WeightBalancedIrreps
    from models.segnn.segnn import SEGNN

    from ace_plugins import patched, status

    attributes = Irreps.spherical_harmonics(3)
    hidden = WeightBalancedIrreps(Irreps("128x0e"), attributes, sh=True, lmax=2)
    ends = Irreps("5x0e"), hidden, Irreps("1x0e")
    graphs = {"pool": "avg", "task": "graph", "additional_message_irreps": Irreps("1x0e")}
    with patched("segnn"):
        model = SEGNN(*ends, attributes, attributes, num_layers=7, norm="instance", **graphs)
    now = status(model)
    return [now.upstream_parameters, sum(p.numel() for p in model.parameters()), len(now.sites)]


def seconv() -> None:
    import torch

    from ace_plugins import equivariance_error, patched, status
    from ace_segnn.example import nbody_example

    for kind in ("linear", "nonlinear"):
        for norm in ("instance", "batch", "none"):
            with patched("segnn", trace=False):
                example = nbody_example(0, "SEConv", layers=1, norm=norm, conv_type=kind)
            model, batch = example.model.double(), example.args[0]
            assert [site.name for site in status(model).sites] == ["layers.0.gate"]
            for key in ("x", "pos", "edge_attr", "node_attr", "additional_message_features"):
                batch[key] = batch[key].double()
            assert equivariance_error(model, (batch,)).relative < 1e-6, (kind, norm)
            assert equivariance_error(model, (batch,), branches_on=True).relative > 1e-3, (kind, norm)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            model.train()(batch).square().mean().backward()
            optimizer.step()
            assert status(model).steps == 1


def doctor() -> Any:
    from click.testing import CliRunner

    from ace_plugins.cli.main import cli

    result = CliRunner().invoke(cli, ["doctor", "segnn", "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def preprocessing() -> dict[str, Any]:
    """Audits of positions and velocities going through preprocessing and model: upstream's own, and two written here,
    which differ in the axis of the mean alone."""
    import torch
    from e3nn.o3 import Irreps, spherical_harmonics
    from torch_geometric.data import Data

    from ace_plugins import audit, patched
    from ace_plugins.adapter import E3, GroupAction, Positions, Vectors
    from ace_segnn.example import nbody_batch, nbody_model

    with patched("segnn", mode="off"):
        from nbody.train_nbody import O3Transform
    torch.manual_seed(0)
    model = nbody_model(layers=1).double().eval()
    batch = nbody_batch()
    ends, charges = batch.edge_index, batch.additional_message_features[:, 1:].double()

    def made(pos: Any, vel: Any, centre: Any) -> Any:
        apart = pos[ends[0]] - pos[ends[1]]
        around, along = (
            spherical_harmonics(Irreps.spherical_harmonics(1), vectors, normalize=True, normalization="integral")
            for vectors in (apart, vel)
        )
        graph = Data(pos=pos, edge_index=ends, edge_attr=around, batch=batch.batch)
        graph.x = torch.cat([pos - centre, vel, vel.norm(dim=1, keepdim=True)], 1)
        graph.node_attr = along.index_add(0, ends[1], around)
        graph.additional_message_features = torch.cat([apart.norm(dim=1, keepdim=True), charges], 1)
        return graph

    def over_xyz(pos: Any, vel: Any) -> Any:
        return model(made(pos, vel, pos.mean(1, keepdim=True)))

    def over_particles(pos: Any, vel: Any) -> Any:
        mean = pos.view(3, 5, 3).mean(1)
        return model(made(pos, vel, mean[batch.batch]))

    transform, each = O3Transform(1), torch.randn(15, 1).double()

    def upstreams(pos: Any, vel: Any) -> Any:
        # The real one wants the charges of particles, ours their products along edges.
        graph = Data(pos=pos, vel=vel, edge_index=ends, edge_attr=charges, charges=each, batch=batch.batch)
        return model(transform(graph))

    pos, vel = torch.randn(2, 15, 3).double()
    action = GroupAction(E3, {"pos": Positions(), "vel": Vectors()}, outputs=Vectors())
    found = {fn.__name__: audit(fn, (pos, vel), action).to_dict() for fn in (over_xyz, over_particles, upstreams)}
    return {**found, "model": audit(model, (batch,)).to_dict()}


@pytest.fixture(scope="module")
def answers(checkout: Path) -> Answers:
    return ask(fresh(checkout), shims, qm9, seconv, doctor, preprocessing)


def test_the_shims_do_what_is_missing(answers: Answers) -> None:
    answers(shims)


def test_the_qm9_configuration(answers: Answers) -> None:
    assert answers(qm9) == [1_033_525, 9_869_667, 14]


def test_seconv_with_every_norm(answers: Answers) -> None:
    answers(seconv)


def test_doctor_measures_the_symmetry(answers: Answers) -> None:
    assert_healthy(answers(doctor), 147_424, 937_960)


def test_upstreams_preprocessing_breaks_the_symmetry_that_its_model_has(answers: Answers) -> None:
    """Upstream subtracts ``pos.mean(1)``, the mean of x, y and z of each particle, instead of the centre."""
    told = answers(preprocessing)
    assert told["model"]["verdict"] == "symmetric"
    assert told["model"]["culprits"] == []
    assert told["model"]["uncovered"] == ["graph.additional_message_features"]
    assert told["over_particles"]["error"]["relative"] < 1e-12
    for broken in ("over_xyz", "upstreams"):
        assert told[broken]["verdict"] == "broken"
        assert told[broken]["error"]["relative"] > 1e-2


# Two processes.

SPAWN = """
    import ace_plugins.activate
    import copy, os, socket, sys, warnings; warnings.simplefilter("ignore")
    import torch, torch.multiprocessing as mp
    from torch_geometric.data import Batch
    from ace_segnn.example import nbody_batch, nbody_model

    def graphs(number, rank, world):
        torch.manual_seed(number)
        made = [nbody_batch(1) for _ in range(4)]
        for graph in made:
            graph.batch = None
        return Batch.from_data_list(made[rank::world])

    def train(rank, world, model, folder):
        torch.set_num_threads(1)
        if world > 1:
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
            model = copy.deepcopy(model)  # on the CPU both processes were sent the same memory
        trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
        for number in range(4):
            optimizer.zero_grad()
            (trained(graphs(number, rank, world)) - 1).square().mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{world}.{rank}.pt")
        if world > 1:
            torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nbody_model(layers=1)
        alone = copy.deepcopy(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        mp.spawn(train, nprocs=2, args=(2, model, sys.argv[1]))
        train(0, 1, alone, sys.argv[1])
"""


def test_a_model_sent_to_two_processes_is_one_on_the_joined_batch(root: Path, tmp_path: Path) -> None:
    """Build the model and spawn training processes, like main.py with --gpus 2."""
    patched(root, "--preset", "paper", "--mode", "resilient", "--dual-lr", "0.05")
    (root / "spawn.py").write_text(textwrap.dedent(SPAWN))
    done = python(root, "spawn.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / name) for name in ("1.0.pt", "2.0.pt", "2.1.pt"))
    assert float(alone["ace.duals.lambda_"].min()) > 1e-3, "the duals moved"
    for name in ("ace.gamma", "ace.duals.lambda_", "ace.duals.u"):
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], alone[name], atol=1e-5), name
    assert all(torch.allclose(first[name], alone[name], atol=1e-4) for name in alone)
    # One banner, where the model was built; a summary of the two as one, and one of the process that trained alone.
    assert done.stderr.count("attached to SEGNN") == 1
    assert done.stderr.count("ACE resilient, 4 steps") == 2
    assert "no training step" not in done.stderr


def test_seconv_in_a_run_that_diverged(mini: Path) -> None:
    nbody.generate(mini / "nbody" / "dataset", train=20, valid=10, test=10)
    options = [*TRAIN, *MODEL, "--model=seconv", "--layers=1", "--hidden_features=16", "--lr=1e30", "--epochs=1"]
    done = ace(mini, "run", "segnn", "--json", "--", "main.py", *options)
    assert "attached to SEConv, 1 site" in done.stderr
    told = json.loads(done.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(name))
    (site,) = told["runs"][0]["sites"]
    assert (site["name"], site["verdict"]) == ("layers.0.gate", "diverged")


# What is not installed.

OPTIONAL = """
    import wandb
    try:
        from torch_scatter import scatter, scatter_max
        also = 1
    except ImportError:
        also = 0
"""
PROBE = """
    import ace_plugins.activate
    try:
        import wandb
    except ImportError:
        wandb = None
    try:
        from torch_scatter import scatter_max
    except ImportError:
        scatter_max = None
    import optional
    import torch_geometric.typing as typing
    print(wandb, scatter_max, optional.also, optional.wandb.run, typing.WITH_TORCH_SCATTER)
    optional.wandb.init()
"""


def test_what_is_not_installed(mini: Path) -> None:
    """Code that probes for a package, as ``try: import wandb`` does, does not find it. Upstream gets a stub that raises
    when it is called. PyTorch Geometric, imported later, does not take the stub for torch_scatter."""
    if find_spec("wandb") or find_spec("torch_scatter"):
        pytest.skip("wandb or torch_scatter is installed")
    (mini / "probe.py").write_text(textwrap.dedent(PROBE))
    (mini / "optional.py").write_text(textwrap.dedent(OPTIONAL))
    done = python(patched(mini), "-W", "ignore", "probe.py")
    assert done.stdout.splitlines() == ["None None 0 None False"], done.stderr
    assert done.returncode == 1
    assert re.search(r"^ace: wandb\.init.*pip install wandb", done.stderr, re.M)
    assert "Traceback" not in done.stderr
    refused = python(patched(mini, "--no-shims"), "probe.py")
    assert refused.returncode == 1
    assert "ModuleNotFoundError: No module named 'wandb'" in refused.stderr


# The real upstream alone.


def test_the_pinned_commit_is_known() -> None:
    assert_commit_is_known("segnn", CHECKOUT)


def layout() -> dict[str, Any]:
    import inspect

    from e3nn.o3 import Irreps
    from models import balanced_irreps
    from models.segnn import instance_norm, o3_building_blocks, seconv, segnn

    from ace_segnn.example import nbody_model

    def names(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [f"{p.name}{'' if p.default is p.empty else '=...'}" for p in parameters]

    def shapes(model: Any) -> dict[str, list[int]]:
        return {k: list(v.shape) for k, v in model.state_dict().items()}

    attributes = Irreps.spherical_harmonics(1)
    hidden = balanced_irreps.WeightBalancedIrreps(Irreps("64x0e"), attributes, sh=True, lmax=1)
    ends = Irreps("5x0e"), hidden, Irreps("1x0e")
    graphs = {"task": "graph", "additional_message_irreps": Irreps("1x0e")}
    out: dict[str, Any] = {"hidden": str(hidden), "balanced": str(balanced_irreps.BalancedIrreps(2, 64, True))}
    for norm in ("none", "instance", "batch"):
        out[f"segnn {norm}"] = shapes(nbody_model("SEGNN", layers=2, norm=norm))
        out[f"graph {norm}"] = shapes(segnn.SEGNN(*ends, attributes, attributes, num_layers=1, norm=norm, **graphs))
        for kind in ("linear", "nonlinear"):
            out[f"seconv {norm} {kind}"] = shapes(nbody_model("SEConv", layers=2, norm=norm, conv_type=kind))
    for module in (segnn, seconv, o3_building_blocks, instance_norm, balanced_irreps):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__:
                out[f"{module.__name__}.{name}"] = names(value)
                for method, function in vars(value).items() if inspect.isclass(value) else ():
                    public = method == "__init__" or not method.startswith("_")
                    if inspect.isfunction(function) and public and function.__module__ == module.__name__:
                        out[f"{module.__name__}.{name}.{method}"] = names(function)
    return out


def test_the_miniature_has_the_real_ones_names_signatures_and_shapes(mini: Path) -> None:
    assert_same_layout(mini, "segnn", layout)


def printed(root: Path) -> set[str]:
    """Return the formats of the lines that the two training scripts print."""
    calls = [
        call
        for name in ("nbody/train_nbody.py", "qm9/train.py")
        for call in ast.walk(ast.parse((root / name).read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
    ]
    first = [call.args[0].left if isinstance(call.args[0], ast.BinOp) else call.args[0] for call in calls]
    return {each.value for each in first if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def test_the_miniature_prints_the_lines_of_the_real_one(mini: Path) -> None:
    assert len(printed(mini)) == 7
    assert printed(mini) == printed(given("segnn"))


# Beside the authors' own code.

COMMON = """
    import sys, warnings; warnings.simplefilter("ignore")
    from argparse import Namespace
    import torch
    from e3nn.o3 import Irreps
    STEPS, BATCH, NODES = 10, 8, 5
    OPTIONS = dict(lr=9e-4, weight_decay=0.0)
    def build(cls, **more):
        attributes = Irreps.spherical_harmonics(1)
        return cls(Irreps("2x1o + 1x0e"), Irreps("32x0e + 32x1o"), Irreps("1x1o"), attributes, attributes, num_layers=4,
                   norm="none", task="node", additional_message_irreps=Irreps("2x0e"), **more)
    class Loader(list):
        partition = "train"
        dataset = property(lambda self: self)
        def get_edges(self, batch_size, n_nodes):
            pairs = [(i, j) for i in range(n_nodes) for j in range(n_nodes) if i != j]
            rows, columns = torch.tensor(pairs).T
            shift = torch.arange(batch_size).repeat_interleave(len(pairs)) * n_nodes
            return [rows.repeat(batch_size) + shift, columns.repeat(batch_size) + shift]
    folder = sys.argv[1]
"""
AUTHORS = """
    torch.manual_seed(3)
    from models.segnn.segnn import SEGNN
    from nbody import train_nbody as theirs
    args = Namespace(disable_equivariance=1, use_constrained=1, resilience=0, epsilon=0.0, auglag_const=0.0, rho=1,
                     batch_size=BATCH, model="segnn", time_exp=False, train_augments=0, log_equivariance_metric=0)
    model = build(SEGNN, args=args)
    torch.save(model.state_dict(), f"{folder}/start.pt")
    batches = [[torch.randn(BATCH, NODES, 3), torch.randn(BATCH, NODES, 3), torch.zeros(BATCH, 20, 1),
                torch.randint(0, 2, (BATCH, NODES, 1)) * 2.0 - 1, torch.randn(BATCH, NODES, 3)] for _ in range(STEPS)]
    torch.save(batches, f"{folder}/batches.pt")
    gammas = model.get_gammas()
    lambdas = [torch.zeros(()) for _ in gammas]
    optimizer, dual = torch.optim.Adam(model.parameters(), **OPTIONS), torch.optim.Adam(lambdas, lr=8e-4)
    history = []
    for step in range(STEPS):
        loss, _ = theirs.run_epoch(model, optimizer, dual, torch.nn.MSELoss(), step, Loader([batches[step]]),
                                   theirs.O3Transform(1), torch.device("cpu"), args, disable_equivariance=True,
                                   gammas=gammas, lambdas=lambdas, us=[])
        history.append([loss, torch.stack(gammas).tolist(), torch.stack(lambdas).tolist()])
    torch.save(history, f"{folder}/theirs.pt")
"""
OURS = """
    from models.segnn.segnn import SEGNN
    from nbody import train_nbody as upstream
    from ace_plugins.engine.state import key
    model = build(SEGNN)
    start, batches = torch.load(f"{folder}/start.pt"), torch.load(f"{folder}/batches.pt")
    state = model.state_dict()
    for name, value in start.items():
        layer = name.split(".")
        if "lin_noneq" in name:
            site = f"layers.{layer[1]}.update_layer_{layer[2][-1]}"
            name = f"ace.branches.{key(site)}." + ".".join(layer[3:])
        elif "gammas" in name:
            state["ace.gamma"][2 * int(layer[1]) + int(layer[3])] = value
            continue
        assert state[name].shape == value.shape, name
        state[name] = value
    model.load_state_dict(state)
    class Transform(upstream.O3Transform):
        # The authors do not centre the positions; upstream does, over the wrong axis.
        def __call__(self, graph):
            graph = super().__call__(graph)
            graph.x = torch.cat([graph.pos, graph.x[:, 3:]], 1)
            return graph
    args = Namespace(batch_size=BATCH, model="segnn", time_exp=False)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIONS)
    history = []
    for step in range(STEPS):
        loss = upstream.run_epoch(model, optimizer, torch.nn.MSELoss(), step, Loader([batches[step]]), Transform(1),
                                  "cpu", args)
        history.append([loss, model.ace.gamma.tolist(), model.ace.duals.lambda_.tolist()])
    torch.save(history, f"{folder}/ours.pt")
"""


def test_ten_steps_are_the_authors_own(tmp_path: Path) -> None:
    authors = given("ace") / "Steerable-E3-GNN"
    root = patched(real("segnn", tmp_path), "--preset", "paper")
    extra = Path(stand_ins(tmp_path / "extra"))
    (extra / "pytorch3d").mkdir()
    (extra / "pytorch3d" / "__init__.py").write_text("")
    (extra / "pytorch3d" / "transforms.py").write_text("Rotate = random_rotations = None\n")
    theirs = python(
        authors,
        "-c",
        textwrap.dedent(COMMON + AUTHORS),
        str(tmp_path),
        PYTHONPATH=str(extra),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert theirs.returncode == 0, theirs.stderr
    (root / "ten.py").write_text("import ace_plugins.activate\n" + textwrap.dedent(COMMON + OURS))
    ours = python(root, "ten.py", str(tmp_path))
    assert ours.returncode == 0, ours.stderr
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("theirs", "ours"))
    assert len(one) == len(two) == 10
    for (loss, gamma, lambda_), (my_loss, my_gamma, my_lambda) in zip(one, two, strict=True):
        assert my_loss == pytest.approx(loss, abs=1e-5)
        assert my_gamma == pytest.approx(gamma, abs=1e-5)
        assert my_lambda == pytest.approx(lambda_, abs=1e-5)
    assert abs(one[-1][2][0]) > 5e-3, "lambda moved"
