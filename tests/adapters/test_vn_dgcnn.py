"""The adapter for vector neurons: on the miniature upstream always, on the real one where ACE_UPSTREAM_VN_DGCNN names
a checkout. All of it without a GPU."""

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
    miniature,
    python,
    real,
)

np = pytest.importorskip("numpy", reason="needs numpy: pip install 'ace-vn-dgcnn[upstream]'")

from ace_vn_dgcnn.branch import VectorLinear
from ace_vn_dgcnn.data import shapes
from ace_vn_dgcnn.upstream import CHECKOUT, MODELS

DATA = Path("data") / "modelnet40_normal_resampled"
RUN = "--model vn_dgcnn_cls --rot so3 --log_dir run --num_point 32 --n_knn 5 --batch_size 4".split()
TRAIN = [*RUN, "--epoch", "2", "--optimizer", "Adam"]
"""Adam, since SGD with a rate of 0.1 does not learn from a dozen shapes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    shapes.generate(folder, classes=3, train=4, test=2, points=32)
    return folder


@pytest.fixture(scope="module", params=[miniature, real], ids=["miniature", "real"])
def checkout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return with_shapes(request.param("vn_dgcnn", tmp_path_factory.mktemp("vn_dgcnn")), data)


@pytest.fixture
def root(checkout: Path) -> Path:
    shutil.rmtree(checkout / "log", ignore_errors=True)
    return fresh(checkout)


@pytest.fixture
def mini(tmp_path: Path, data: Path) -> Path:
    return with_shapes(miniature("vn_dgcnn", tmp_path), data)


def with_shapes(checkout: Path, data: Path) -> Path:
    shutil.copytree(data, checkout / DATA)
    with (checkout / ".git" / "info" / "exclude").open("a") as exclude:
        exclude.write("data/\nlog/\n")
    return checkout


def patched(root: Path, *arguments: str) -> Path:
    done = ace(root, "vn-dgcnn", "--cpu", *arguments)
    assert done.returncode == 0, done.stderr
    return root


def accuracies(output: str) -> list[str]:
    return [line for line in output.splitlines() if "Accuracy" in line]


def test_the_scripts_of_a_patched_checkout_train_with_ace_and_plain_upstream_loads_what_they_save(
    root: Path, tmp_path: Path
) -> None:
    patched(root)
    done = python(root, "train_cls.py", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert len([line for line in accuracies(done.stdout) if line.startswith("Train")]) == 2
    banner = re.search(r"^ace: vn_dgcnn .*$", done.stderr, re.MULTILINE)
    assert banner is not None, done.stderr
    for part in ("14 sites", "2,899,830 parameters + 5,931,782 of ACE", "mode auto", "shims: ", "cpu"):
        assert part in banner[0]
    assert 2_899_830 + 5_931_782 == 8_831_612
    assert "ace: device cpu: " in done.stderr
    assert re.search(r"ACE auto, landed at step 5, \d+ of \d+ steps, trace in \.ace/runs/", done.stderr)
    assert "std_feature.vn2.map_to_dir" in done.stderr
    assert set(git(root, "status", "--porcelain").split()) == {"M", "??", "ace.toml", *CHECKOUT.scripts}
    again = python(root, "train_cls.py", *TRAIN)
    assert "Use pretrain model" in again.stdout, "resumed, which torch.load has refused since 2.6"

    saved = root / "log" / "cls" / "run" / "checkpoints" / "best_model.pth"
    with_ace = shutil.copy(saved, tmp_path)
    done = ace(root, "export", str(with_ace), "-o", str(saved), "--overwrite")
    assert done.returncode == 0, done.stderr
    plain = git(fresh(root), "status", "--porcelain")
    off = ("run", "vn_dgcnn", "--mode", "off", "--cpu", "--", "test_cls.py", *RUN)
    done = ace(root, *off)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Test Instance Accuracy: [01]\.\d+", done.stdout)
    assert git(root, "status", "--porcelain") == plain, "nothing was patched there"
    shutil.copy(with_ace, saved)
    refused = ace(root, *off)
    assert refused.returncode != 0
    assert "Unexpected key(s) in state_dict" in refused.stderr


FAKES = """
    import sys, types
    import torch
    from ace_vn_dgcnn.shims import transforms
    package = types.ModuleType("pytorch3d"); package.__path__ = []
    sys.modules.update({"pytorch3d": package, "pytorch3d.transforms": transforms})
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    plain = torch.arange
    torch.arange = lambda *args, device=None, **more: plain(*args, **more)
"""


def test_off_is_the_plain_script_bit_for_bit(mini: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "sitecustomize.py").write_text(textwrap.dedent(FAKES))
    command = ["train_cls.py", *TRAIN, "--seed", "1"]
    plain = python(mini, *command, PYTHONPATH=str(extra))
    assert plain.returncode == 0, plain.stderr
    shutil.rmtree(mini / "log")
    patched(mini, "--mode", "off")
    off = python(mini, *command)
    assert off.returncode == 0, off.stderr
    assert accuracies(off.stdout) == accuracies(plain.stdout) != []
    assert off.stdout == plain.stdout


def test_patch_and_revert_leave_git_as_it_was(root: Path) -> None:
    assert_revert_is_whole(root, "vn-dgcnn", "--cpu")
    assert 'device = "cpu"' in (patched(root) / "ace.toml").read_text()


# Answered by one process.


def every_model() -> dict[str, list[Any]]:
    """Return sites, relative error without and with branches, and steps, for each model and pooling."""
    import torch

    from ace_plugins import equivariance_error, patched, status
    from ace_vn_dgcnn.example import shapes_example

    told = {}
    for name in ("vn_dgcnn_cls", "vn_dgcnn_partseg", "vn_pointnet_cls", "vn_pointnet_partseg"):
        for pooling in ("mean", "max"):
            with patched("vn_dgcnn", device="cpu", trace=False, gamma_init=1.0):
                example = shapes_example(0, name, pooling=pooling)
            model, batch = example.model.double(), tuple(x.double() for x in example.args)
            errors = [equivariance_error(model, batch, branches_on=on).relative for on in (False, True)]
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(2):
                optimizer.zero_grad()
                model.train()(*batch)[0].square().mean().backward()
                optimizer.step()
            told[f"{name} {pooling}"] = [len(status(model).sites), *errors, status(model).steps]
    return told


def prepared() -> list[int]:
    """Return the dimensions of all tensors that branches prepare in one forward pass."""
    from ace_plugins import patched
    from ace_vn_dgcnn.branch import VectorLinear
    from ace_vn_dgcnn.example import shapes_example

    calls = []
    plain = VectorLinear.prepare
    VectorLinear.prepare = lambda self, x: calls.append(x.dim()) or plain(self, x)
    with patched("vn_dgcnn", preset="paper", device="cpu", trace=False):
        example = shapes_example(0)
    example.model.train()(*example.args)
    VectorLinear.prepare = plain
    return calls


def bounded() -> list[float]:
    """Return the norm of every bounded branch after a few steps."""
    import copy
    import pickle

    import torch

    from ace_plugins import patched
    from ace_plugins.engine.spectral_norm import divide, find_bounded
    from ace_vn_dgcnn.example import shapes_example

    with patched("vn_dgcnn", device="cpu", trace=False, mode="resilient", spectral_norm=True):
        example = shapes_example(0)
    model = example.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        model(*example.args)[0].square().mean().backward()
        optimizer.step()
    model.eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(*example.args)[0], model(*example.args)[0])
    assert len(set(model.ace.prepared_by.values())) == 7
    return [torch.linalg.matrix_norm(weight, 2).item() for weight in divide(find_bounded(model.ace.branches))]


def doctor() -> Any:
    from click.testing import CliRunner

    from ace_plugins.cli.main import cli

    return json.loads(CliRunner().invoke(cli, ["doctor", "vn-dgcnn", "--json"], catch_exceptions=False).stdout)


@pytest.fixture(scope="module")
def answers(checkout: Path) -> Answers:
    return ask(fresh(checkout), every_model, prepared, bounded, doctor)


def test_every_model_with_every_pooling(answers: Answers) -> None:
    sites = {"vn_dgcnn_cls": 14, "vn_dgcnn_partseg": 16, "vn_pointnet_cls": 20}
    told = answers(every_model)
    assert len(told) == 8
    for name, (found, without, with_branches, steps) in told.items():
        assert found == sites.get(name.split()[0], found), name
        assert without < 1e-9, name
        assert with_branches > 1e-6, name
        assert steps == 2


def test_both_branches_of_a_layer_share_what_they_read(answers: Answers) -> None:
    assert answers(prepared) == [5, 5, 5, 5, 4, 4, 4]


def test_branches_can_be_bounded(answers: Answers) -> None:
    assert answers(bounded) == [pytest.approx(1, abs=0.01)] * 14


def test_doctor_measures_the_symmetry(answers: Answers) -> None:
    assert_healthy(answers(doctor), 2_899_830, 8_831_612)


TWICE = """
    import os, sys, warnings; warnings.simplefilter("ignore")
    import ace_plugins.activate
    sys.path.append(os.path.join(os.getcwd(), "models"))
    import importlib
    from argparse import Namespace
    from ace_plugins import status
    args = Namespace(n_knn=5, pooling="mean")
    bare, full = importlib.import_module("vn_dgcnn_cls"), importlib.import_module("models.vn_dgcnn_cls")
    assert bare.get_model is not full.get_model
    for module in (bare, full, bare):
        model = module.get_model(args)
        assert len(status(model).sites) == 14
    print("done")
"""


def test_one_file_under_two_names(root: Path) -> None:
    patched(root)
    (root / "twice.py").write_text(textwrap.dedent(TWICE))
    done = python(root, "twice.py")
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
    assert done.stderr.count("attached to get_model, 14 sites") == 3, "once each"


# The branch.


def dense(branch: VectorLinear, x: torch.Tensor) -> torch.Tensor:
    """Compute the same point by point, with the channels of a point as one vector c0x c0y c0z c1x ..."""
    points = x.flatten(3) if x.dim() > 3 else x[..., None]
    made = torch.stack([points[..., i].flatten(1) @ branch.weight.T + branch.bias for i in range(points.shape[-1])], -1)
    return made.reshape(len(x), -1, 3, *x.shape[3:]).transpose(1, -1)


@pytest.mark.parametrize("points", [(), (7,), (6, 4)], ids=["3", "4", "5"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_branch_acts_on_each_point_alone(points: tuple[int, ...], turned: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, *points).double()
    if turned:  # as upstream's own linear maps leave it in memory
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    x.requires_grad_()
    feat, direction = VectorLinear(15, 12).double(), VectorLinear(15, 3).double()
    prepared = feat.prepare(x)
    values = []
    for branch, scale in ((feat, 0.5), (direction, -2.0)):
        gamma, expected = torch.tensor(scale, dtype=torch.float64), dense(branch, x)
        output = torch.randn_like(expected, memory_format=torch.contiguous_format)
        before = output.clone()
        value = (branch.add_to(output, gamma, prepared) - before) / gamma
        values.append(value)
        assert torch.allclose(value, expected, atol=1e-12)
        assert torch.allclose(branch(x), expected, atol=1e-12)
        weights = torch.randn_like(expected)
        wanted = [x, *branch.parameters()]
        ours = torch.autograd.grad((value * weights).sum(), wanted, retain_graph=True)
        theirs = torch.autograd.grad((expected * weights).sum(), wanted)
        for one, two in zip(ours, theirs, strict=True):
            assert torch.allclose(one, two, atol=1e-10)
    if points:
        order = torch.randperm(points[0])
        moved = feat(x.index_select(3, order))
        axis = 3 if len(points) == 2 else 1
        assert torch.allclose(moved, values[0].index_select(axis, order), atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # torch's own, of the compiler
def test_half_precision_and_compilers() -> None:
    torch.manual_seed(0)
    x, branch = torch.randn(2, 4, 3, 6, 5), VectorLinear(12, 9)
    expected, gamma = dense(branch, x), torch.ones(())
    output = torch.zeros_like(expected, memory_format=torch.contiguous_format)
    half = branch.add_to(output.bfloat16(), gamma, branch.prepare(x))
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected, atol=0.05)

    def add(x: torch.Tensor) -> torch.Tensor:
        return branch.add_to(output, gamma, branch.prepare(x))

    assert torch.allclose(torch.compile(add, backend="eager")(x), expected, atol=1e-5)


@pytest.mark.parametrize("points", [(7,), (6, 4)], ids=["4", "5"])
@pytest.mark.parametrize("holds", [True, False])
def test_what_is_repeated_is_mapped_once(points: tuple[int, ...], holds: bool) -> None:
    """If the input does not repeat, it is mapped completely."""
    torch.manual_seed(0)
    own, centre = torch.randn(2, 4, 3, *points).double(), torch.randn(2, 4, 3, *points[:-1], 1).double()
    own.requires_grad_()
    centre.requires_grad_()
    x = torch.cat([own, centre.expand_as(own)], 1)
    if not holds:
        x = x + torch.zeros_like(x).index_fill_(-1, torch.tensor([1]), 1e-9)
    branch = VectorLinear(24, 6, repeats=True).double()
    value, expected = branch(x), dense(branch, x)
    assert torch.allclose(value, expected, atol=1e-12)
    weights = torch.randn_like(expected)
    wanted = [own, centre, *branch.parameters()]
    ours = torch.autograd.grad((value * weights).sum(), wanted)
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=1e-10)


# Without a GPU.

CONFINED = """
    import sys, warnings; warnings.simplefilter("ignore")
    import ace_plugins.activate
    import models.vn_dgcnn_cls
    import torch
    import elsewhere
    from models.utils import vn_dgcnn_util
    assert torch.zeros(1).cuda().device.type == "cpu"
    assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
    assert vn_dgcnn_util.torch.device("cuda").type == "cpu"
    assert torch.device("cuda").type == "cuda"
    assert isinstance(torch.device("cpu"), vn_dgcnn_util.torch.device)
    if not torch.cuda.is_available():
        for call in (elsewhere.tensor, elsewhere.module):
            try:
                call()
            except (AssertionError, RuntimeError) as error:
                print("refused")
"""
ELSEWHERE = """
    import torch
    def tensor():
        return torch.zeros(1).cuda()
    def module():
        return torch.nn.Linear(1, 1).cuda()
"""


def test_only_upstreams_own_calls_are_redirected(mini: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    patched(mini)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "elsewhere.py").write_text(textwrap.dedent(ELSEWHERE))
    (mini / "confined.py").write_text(textwrap.dedent(CONFINED))
    done = python(mini, "confined.py", PYTHONPATH=str(tmp_path / "lib"))
    assert done.stdout.split() == ["refused", "refused"], done.stderr


def test_without_being_asked_upstream_wants_its_gpu(mini: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert ace(mini, "vn_dgcnn").returncode == 0
    done = python(mini, "train_cls.py", *TRAIN)
    assert done.returncode == 1
    assert re.search(r"(AssertionError|RuntimeError): .*(CUDA|NVIDIA)", done.stderr)
    assert "device cpu" not in done.stderr
    asked = python(mini, "train_cls.py", *TRAIN, ACE_DEVICE="cpu")
    assert asked.returncode == 0, asked.stderr


def test_a_gpu_that_is_left_alone_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ace_vn_dgcnn.shims import without_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(without_gpu, "_redirect_calls", lambda owner: None)
    monkeypatch.setattr(without_gpu, "whenever_imported", lambda *_, **__: None)
    without_gpu.redirect()
    told = capsys.readouterr().err
    assert "device cpu: " in told
    assert "A100" in told
    assert 'device = "auto"' in told


def test_other_adapters_redirect_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ace_segnn")
    root = miniature("segnn", tmp_path)
    done = ace(root, "segnn", "--cpu")
    assert done.returncode == 2
    assert "adapter 'segnn'" in done.stderr
    assert not (root / "ace.toml").exists()
    done = ace(root, "segnn", "--device", "gpu")
    assert done.returncode == 2
    assert "unknown device 'gpu': expected one of auto, cpu" in done.stderr


# Mistakes are upstream's to tell.


def test_an_unknown_model(mini: Path) -> None:
    patched(mini)
    done = python(mini, "train_cls.py", "--model", "vn_dgcnn_clz")
    assert done.returncode == 2
    assert "invalid choice: 'vn_dgcnn_clz'" in done.stderr
    assert "ace:" not in done.stderr.replace("ace: device cpu", "")


def test_a_missing_data_folder(mini: Path) -> None:
    patched(mini)
    shutil.rmtree(mini / "data")
    done = python(mini, "train_cls.py", *TRAIN)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    last = [line for line in done.stderr.splitlines() if line and not line.startswith("ace: ")][-1]
    assert re.match(r"FileNotFoundError: .*modelnet40_shape_names\.txt", last)


# The real upstream alone.


def test_the_pinned_commit_is_known() -> None:
    assert_commit_is_known("vn_dgcnn", CHECKOUT)


def layout() -> dict[str, Any]:
    import inspect

    from models import vn_layers
    from models.utils import vn_dgcnn_util

    from ace_vn_dgcnn.example import shapes_model

    def names(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [f"{p.name}{'' if p.default is p.empty else '=...'}" for p in parameters]

    out: dict[str, Any] = {}
    for model in ("vn_dgcnn_cls", "vn_dgcnn_partseg", "vn_pointnet_cls"):
        for pooling in ("mean", "max"):
            made = shapes_model(model, pooling=pooling)
            out[f"{model} {pooling}"] = [[k, list(v.shape)] for k, v in made.state_dict().items()]
        out[model] = [names(type(made).__init__), names(type(made).forward)]
    for cls in ("VNLinear", "VNLeakyReLU", "VNLinearLeakyReLU", "VNBatchNorm", "VNMaxPool", "VNStdFeature"):
        for method in ("__init__", "forward"):
            out[f"{cls}.{method}"] = names(getattr(getattr(vn_layers, cls), method))
    for name in ("knn", "get_graph_feature", "get_graph_feature_cross"):
        out[name] = names(getattr(vn_dgcnn_util, name))
    return out


def test_the_miniature_has_the_real_ones_names_signatures_and_shapes(mini: Path) -> None:
    assert_same_layout(mini, "vn_dgcnn", layout)


def test_all_models_are_named() -> None:
    assert set(CHECKOUT.shape) >= {f"models/{name}.py" for name in MODELS}
