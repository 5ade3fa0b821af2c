"""The SEGNN adapter: on the miniature upstream always, on the real one where ACE_UPSTREAM_SEGNN names a checkout."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from clones import (
    ace,
    assert_battery,
    assert_commit_is_known,
    assert_revert_is_whole,
    git,
    given,
    layouts,
    miniature,
    python,
    real,
)

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'ace-segnn[upstream]'")
pytest.importorskip("e3nn", reason="needs e3nn: pip install 'ace-segnn[upstream]'")

from ace_segnn import nbody
from ace_segnn.upstream import CHECKOUT

PAPER = "--model=segnn --lmax_h=1 --lmax_attr=1 --layers=4 --hidden_features=64 --norm=none".split()
SMALL = "--model=segnn --lmax_h=1 --lmax_attr=1 --layers=2 --hidden_features=16 --norm=none".split()
TRAIN = "--dataset=nbody --epochs=2 --max_samples=20 --batch_size=10 --test_interval=1 --lr=0.001".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nbody")
    nbody.generate(folder, train=20, valid=10, test=10)
    return folder


@pytest.fixture(params=[miniature, real], ids=["miniature", "real"])
def root(request: pytest.FixtureRequest, tmp_path: Path, data: Path) -> Path:
    checkout: Path = request.param("segnn", tmp_path)
    (checkout / "nbody" / "dataset").mkdir(exist_ok=True)
    for file in data.iterdir():
        (checkout / "nbody" / "dataset" / file.name).write_bytes(file.read_bytes())
    return checkout


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
    """The packages the plain script needs and this environment may not have, for the unpatched run."""
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
    done = python(root, "main.py", *TRAIN, *PAPER)
    assert done.returncode == 0, done.stderr
    assert "The model has 937,960 parameters." in done.stdout
    assert len([line for line in losses(done.stdout) if line.startswith("train epoch")]) == 2
    assert "ace" not in done.stdout.replace("(ace): ", "").lower().replace("space", "")[-300:]
    banner = re.search(r"^ace: segnn .*$", done.stderr, re.MULTILINE)
    assert banner is not None, done.stderr
    for part in ("8 sites", "147,424 parameters + 790,536 of ACE", "mode strict", "dual lr 0.0008 (adam)", "at commit"):
        assert part in banner[0]
    assert "shims: torch_scatter, wandb" in banner[0] or _installed("torch_scatter")
    assert re.search(r"ACE strict, 4 steps, trace in \.ace/runs/", done.stderr)
    assert "layers.3.update_layer_2" in done.stderr
    assert git(root, "status", "--porcelain", "main.py", "ace.toml", ".ace").split() == [
        "M",
        "main.py",
        "??",
        "ace.toml",
    ]


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def test_off_is_the_plain_script_bit_for_bit(root: Path, tmp_path: Path) -> None:
    extra = stand_ins(tmp_path / "extra")
    plain = python(root, "main.py", *TRAIN, *SMALL, PYTHONPATH=extra)
    assert plain.returncode == 0, plain.stderr
    patched(root, "--mode", "off")
    off = python(root, "main.py", *TRAIN, *SMALL)
    assert off.returncode == 0, off.stderr
    assert off.stdout == plain.stdout
    assert len(losses(off.stdout)) >= 6
    on = python(root, "main.py", *TRAIN, *SMALL, ACE_MODE="strict")
    assert losses(on.stdout) != losses(plain.stdout)
    assert not (root / ".ace").exists() or len(list((root / ".ace" / "runs").iterdir())) == 1


def test_patch_and_revert_leave_git_as_it_was(root: Path) -> None:
    assert_revert_is_whole(root, "segnn")


CONSTRUCT = """
    import warnings; warnings.simplefilter("ignore")
    from ace_plugins import patched, status
    patched("segnn")
    from e3nn.o3 import Irreps
    from models.balanced_irreps import WeightBalancedIrreps
    from models.segnn.segnn import SEGNN
    attributes = Irreps.spherical_harmonics(3)
    hidden = WeightBalancedIrreps(Irreps("128x0e"), attributes, sh=True, lmax=2)
    model = SEGNN(Irreps("5x0e"), hidden, Irreps("1x0e"), attributes, attributes, num_layers=7, norm="instance",
                  pool="avg", task="graph", additional_message_irreps=Irreps("1x0e"))
    now = status(model)
    print(now.upstream_parameters, sum(p.numel() for p in model.parameters()), len(now.sites))
"""


def test_the_qm9_configuration(root: Path) -> None:
    done = python(root, "-c", textwrap.dedent(CONSTRUCT))
    assert done.stdout.splitlines()[-1] == "1033525 9869667 14", done.stderr


def test_the_battery(root: Path) -> None:
    assert_battery(root, "segnn")


def test_doctor_measures_the_symmetry(root: Path) -> None:
    done = ace(root, "doctor", "segnn", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["parameters_before"], told["parameters_after"]) == (147_424, 937_960)
    assert told["error_at_0"]["relative"] < 1e-4
    assert told["error_at_1"]["relative"] > 100 * told["error_at_0"]["relative"]
    assert told["problems"] == []


SECONV = """
    import warnings; warnings.simplefilter("ignore")
    import torch
    from ace_plugins import equivariance_error, patched, project, status
    patched("segnn")
    from ace_segnn.example import nbody_example
    for kind in ("linear", "nonlinear"):
        for norm in ("instance", "batch", "none"):
            example = nbody_example(0, "SEConv", layers=2, norm=norm, conv_type=kind)
            sites = [site.name for site in status(example.model).sites]
            assert sites == ["layers.0.gate", "layers.1.gate"], sites
            model, batch = example.model.double(), example.args[0]
            for key in ("x", "pos", "edge_attr", "node_attr", "additional_message_features"):
                batch[key] = batch[key].double()
            assert equivariance_error(model, (batch,)).relative < 1e-6
            assert equivariance_error(model, (batch,), branches_on=True).relative > 1e-3
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for _ in range(3):
                optimizer.zero_grad()
                model.train()(batch).square().mean().backward()
                optimizer.step()
            assert status(model).steps == 3
    print("done")
"""


def test_seconv_with_every_norm(root: Path) -> None:
    done = python(root, "-c", textwrap.dedent(SECONV))
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr


def test_seconv_through_the_script(root: Path) -> None:
    patched(root, "--mode", "resilient")
    options = (
        "--model=seconv --lmax_h=1 --lmax_attr=1 --layers=2 --hidden_features=16 --conv_type=nonlinear --norm=instance"
    )
    done = python(root, "main.py", *TRAIN, *options.split())
    assert done.returncode == 0, done.stderr
    assert "attached to SEConv, 2 sites" in done.stderr
    assert "layers.1.gate" in done.stderr


# The real upstream alone.


def test_the_pinned_commit_is_known() -> None:
    assert_commit_is_known("segnn", CHECKOUT)


LAYOUT = """
    import warnings; warnings.simplefilter("ignore")
    import inspect, json
    from ace_segnn.example import nbody_model
    from models.segnn import segnn, seconv, o3_building_blocks, instance_norm
    from models import balanced_irreps
    from e3nn.o3 import Irreps
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return [f"{p.name}{'' if p.default is p.empty else '=...'}" for p in parameters]
    def shapes(model):
        return {k: list(v.shape) for k, v in model.state_dict().items()}
    attributes = Irreps.spherical_harmonics(1)
    hidden = balanced_irreps.WeightBalancedIrreps(Irreps("64x0e"), attributes, sh=True, lmax=1)
    balanced = str(balanced_irreps.BalancedIrreps(2, 64, True))
    def graph_model(cls, norm, **more):
        return cls(Irreps("5x0e"), hidden, Irreps("1x0e"), attributes, attributes, num_layers=1, norm=norm,
                   task="graph", additional_message_irreps=Irreps("1x0e"), **more)
    out = {"hidden": str(hidden), "balanced": balanced}
    for norm in ("none", "instance", "batch"):
        out[f"segnn {norm}"] = shapes(nbody_model("SEGNN", norm=norm))
        out[f"segnn graph {norm}"] = shapes(graph_model(segnn.SEGNN, norm))
        for kind in ("linear", "nonlinear"):
            out[f"seconv {norm} {kind}"] = shapes(nbody_model("SEConv", layers=2, norm=norm, conv_type=kind))
    for module in (segnn, seconv, o3_building_blocks, instance_norm, balanced_irreps):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__:
                out[f"{module.__name__}.{name}"] = names(value)
                if inspect.isclass(value):
                    for method, function in vars(value).items():
                        public = method == "__init__" or not method.startswith("_")
                        if inspect.isfunction(function) and public and function.__module__ == module.__name__:
                            out[f"{module.__name__}.{name}.{method}"] = names(function)
    print(json.dumps(out))
"""


def test_the_miniature_has_the_real_ones_names_signatures_and_shapes(mini: Path) -> None:
    mine, real_one = layouts(mini, "segnn", LAYOUT)
    assert {name: mine.get(name) for name in real_one} == real_one


# Two processes.

SPAWN = "--dataset=qm9 --epochs=2 --batch_size=16 --model=segnn --layers=2 --hidden_features=16 --norm=none".split()


def test_two_spawned_processes_are_one_on_the_joined_batch(mini: Path) -> None:
    patched(mini, "--mode", "resilient", "--dual-lr", "0.05")
    one = python(mini, "main.py", *SPAWN, "--save", "one.pt")
    two = python(mini, "main.py", *SPAWN, "--save", "two.pt", "--gpus", "2")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    alone = torch.load(mini / "one.pt")
    ranks = [torch.load(mini / f"two.pt.rank{rank}") for rank in range(2)]
    assert float(alone["ace.duals.lambda_"].abs().min()) > 1e-3, "the duals moved"
    for name in ("ace.gamma", "ace.duals.lambda_", "ace.duals.u"):
        assert torch.equal(ranks[0][name], ranks[1][name])
        assert torch.allclose(ranks[0][name], alone[name], atol=1e-5), name
    assert all(torch.allclose(ranks[0][name], alone[name], atol=1e-4) for name in alone)
    # One banner, where the model was built, and one summary, where it was trained.
    assert two.stderr.count("attached to SEGNN") == 1
    assert two.stderr.count("ACE resilient, 8 steps") == 1
    assert "no model" not in two.stderr
    assert "made no step" not in two.stderr


DDP = """
    import ace_plugins.activate
    import copy, os, socket, sys, warnings; warnings.simplefilter("ignore")
    import torch, torch.multiprocessing as mp
    from torch_geometric.data import Batch, Data
    from models.segnn.segnn import SEGNN
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
            model = copy.deepcopy(model)
        trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
        for number in range(6):
            optimizer.zero_grad()
            (trained(graphs(number, rank, world)) - 1).square().mean().backward()
            optimizer.step()
        ended = [model.ace.gamma.detach(), model.ace.duals.lambda_, model.ace.duals.u]
        torch.save(ended, f"{folder}/{world}.{rank}.pt")
        if world > 1:
            torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nbody_model(layers=2)
        alone = copy.deepcopy(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        mp.spawn(train, nprocs=2, args=(2, model, sys.argv[1]))
        train(0, 1, alone, sys.argv[1])
"""


def test_a_built_model_sent_to_two_processes_is_one_on_the_joined_batch(root: Path, tmp_path: Path) -> None:
    patched(root, "--mode", "resilient", "--dual-lr", "0.05")
    (root / "ddp.py").write_text(textwrap.dedent(DDP))
    done = python(root, "ddp.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    alone, first, second = (torch.load(tmp_path / name) for name in ("1.0.pt", "2.0.pt", "2.1.pt"))
    assert float(alone[1].min()) > 1e-3, "the duals moved"
    for one, two, three in zip(alone, first, second, strict=True):
        assert torch.equal(two, three)
        assert torch.allclose(one, two, atol=1e-5)
    assert done.stderr.count("ACE resilient, 6 steps") == 2, "the two processes as one, and the one that trained alone"


def test_torchrun(mini: Path) -> None:
    """Every process runs the script; only the first tells."""
    (mini / "each.py").write_text(textwrap.dedent(TORCHRUN))
    patched(mini)
    done = python(mini, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1",
                  "--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "each.py")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1", "4", "4"]
    assert done.stderr.count("attached to SEGNN") == 1
    assert done.stderr.count("ACE strict, 2 steps") == 1


TORCHRUN = """
    import ace_plugins.activate
    import os, warnings; warnings.simplefilter("ignore")
    import torch
    from ace_segnn.example import nbody_example
    from ace_plugins import status
    torch.distributed.init_process_group("gloo")
    example = nbody_example(0, layers=2)
    model = torch.nn.parallel.DistributedDataParallel(example.model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(*example.args).square().mean().backward()
        optimizer.step()
    print(f"{torch.distributed.get_rank()} {len(status(model).sites)}\\n", end="", flush=True)
    torch.distributed.destroy_process_group()
"""

# The shims.


def test_a_missing_wandb_is_told_when_logging_is_asked_for(mini: Path, data: Path) -> None:
    if _installed("wandb"):
        pytest.skip("wandb is installed")
    for file in data.iterdir():
        (mini / "nbody" / "dataset" / file.name).write_bytes(file.read_bytes())
    patched(mini)
    done = python(mini, "main.py", *TRAIN, *SMALL, "--log", "yes")
    assert done.returncode == 1
    assert re.search(r"^ace: wandb.init was called, but wandb is not installed .*pip install wandb", done.stderr, re.M)
    assert "Traceback" not in done.stderr


def test_without_shims_upstream_fails_as_it_does(mini: Path) -> None:
    if _installed("wandb"):
        pytest.skip("wandb is installed")
    patched(mini, "--no-shims")
    done = python(mini, "main.py", *TRAIN, *SMALL)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'wandb'" in done.stderr
    assert "no model" not in done.stderr


SHIMS = """
    import warnings; warnings.simplefilter("ignore")
    import sys, torch
    from torch_geometric.data import Data
    for cls in Data.__mro__:
        if "contains_isolated_nodes" in vars(cls):
            delattr(cls, "contains_isolated_nodes")
    import torch_geometric.typing as typing
    from ace_plugins import patched
    patched("segnn")
    import nbody.train_nbody as upstream
    graph = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3)
    import models.segnn.segnn
    assert graph.contains_isolated_nodes() is True
    src, index = torch.rand(6, 2, dtype=torch.float64), torch.tensor([0, 2, 0, 2, 2, 0])
    for reduce in ("mean", "sum", "add"):
        out = upstream.scatter(src, index, dim=0, reduce=reduce)
        for i in range(3):
            rows = src[index == i]
            wanted = rows.mean(0) if reduce == "mean" and len(rows) else rows.sum(0)
            assert torch.allclose(out[i], wanted), (reduce, i)
    assert not typing.WITH_TORCH_SCATTER or "stand-in" not in str(sys.modules["torch_scatter"].__spec__.origin)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.zeros(1)], 1.0), [1], verbose=True)
    scheduler.optimizer.step(); scheduler.step()
    assert abs(scheduler.get_last_lr()[0] - 0.1) < 1e-9
    print("done")
"""


def test_the_shims_do_what_is_missing(root: Path) -> None:
    done = python(root, "-c", textwrap.dedent(SHIMS))
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr


OPTIONAL = """
    import ace_plugins.activate
    import models.balanced_irreps
    try:
        import wandb
    except ImportError:
        wandb = None
    try:
        from torch_scatter import scatter_max
    except ImportError:
        scatter_max = None
    print(wandb, scatter_max)
    from optional import also
    import optional
    print(optional.wandb.run)
"""


def test_a_question_is_answered_with_no(mini: Path) -> None:
    """try: import wandb: what can do without it does without it."""
    if _installed("wandb") or _installed("torch_scatter"):
        pytest.skip("wandb or torch_scatter is installed")
    patched(mini)
    (mini / "probe.py").write_text(textwrap.dedent(OPTIONAL))
    source = "import wandb\ntry:\n    from torch_scatter import scatter, scatter_max\n    also = 1\n"
    (mini / "optional.py").write_text(source + "except ImportError:\n    also = 0\n")
    done = python(mini, "-W", "ignore", "probe.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["None None", "None"]


def test_json_of_a_run_that_diverged(mini: Path, data: Path) -> None:
    for file in data.iterdir():
        (mini / "nbody" / "dataset" / file.name).write_bytes(file.read_bytes())
    done = ace(mini, "run", "segnn", "--json", "--", "main.py", *TRAIN, *SMALL, "--lr=1e30")
    told = json.loads(done.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(name))
    assert told["runs"][0]["sites"][0]["verdict"] == "diverged"
    assert told["runs"][0]["sites"][0]["gamma"] is None


def test_pyg_does_not_take_the_stand_in_for_torch_scatter(mini: Path) -> None:
    """Upstream may ask for it first."""
    code = "from ace_plugins import patched; patched('segnn'); import probe\n"
    code += "import torch_geometric.typing as t; print(t.WITH_TORCH_SCATTER)"
    (mini / "probe.py").write_text("import torch_scatter\n")
    done = python(mini, "-W", "ignore", "-c", code)
    assert done.stdout.strip() == str(_installed("torch_scatter")), done.stderr


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
    root = patched(real("segnn", tmp_path))
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
