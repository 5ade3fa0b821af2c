"""A script with the marked line trains with ACE: settings, environment, processes, and what it tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import clones
import pytest

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)
"""
TRAIN = """
import sys
import torch
from models.net import Net

def train(model, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model

if __name__ == "__main__":
    torch.manual_seed(0)
    model = train(Net())
    gamma = round(model.ace.gamma.item(), 6) if hasattr(model, "ace") else "plain"
    print(sum(p.numel() for p in model.parameters()), gamma)
"""
ADAPTER = """
from ace_plugins import Checkout, Site, Upstream, hookimpl

@hookimpl
def ace_upstream():
    net = "class Net(Module):\\n    def __init__(self, width=...): ...\\n    def forward(self, x): ..."
    return Upstream("Toy net", ("models.net:Net",), Checkout("me/toy", ("train.py",), {"models/net.py": net}))

@hookimpl
def ace_layers(model):
    return [Site("layer", "layer", (4,), (4,))]

@hookimpl
def ace_preset():
    return {"paper": {"dual_lr": 0.5}, "other": {"mode": "resilient"}}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of a toy upstream, and beside it an installed adapter for it."""
    installed = tmp_path / "installed"
    info = installed / "ace_toy_net-1.dist-info"
    info.mkdir(parents=True)
    (installed / "ace_toy_net.py").write_text(ADAPTER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ace-toy-net\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ace_plugins]\ntoy_net = ace_toy_net\n")
    root = tmp_path / "clone"
    (root / "models").mkdir(parents=True)
    (root / "models" / "net.py").write_text(NET)
    (root / "train.py").write_text(TRAIN)
    return root


def python(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return checkout.python(root, *words, **{"PYTHONPATH": str(root.parent / "installed"), **environment})


def patched(root: Path, *words: str) -> None:
    done = python(root, "-m", "ace_plugins", "toy-net", *words)
    assert done.returncode == 0, done.stderr


PLAIN, WITH_ACE = 20, 20 + 1 + (4 * 8 + 8) + (8 * 4 + 4) + (4 * 4 + 4)


def trained(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    assert done.returncode == 0, done.stderr
    count, gamma = done.stdout.split()
    return int(count), gamma


def test_settings_come_from_the_file_and_the_environment_goes_before_it(root: Path) -> None:
    plain = python(root, "train.py")
    assert trained(plain) == (PLAIN, "plain")
    assert plain.stderr == ""
    patched(root, "--mode", "resilient")
    done = python(root, "train.py")
    assert trained(done)[0] == WITH_ACE
    assert "mode resilient, dual lr 0.5 (sgd)" in done.stderr
    other = python(root, "train.py", ACE_MODE="strict", ACE_DUAL_LR="0.25", ACE_DUALLR="3")
    assert trained(other)[1] != trained(done)[1]
    assert "mode strict, dual lr 0.25 (sgd)" in other.stderr
    assert "ace: unknown variable 'ACE_DUALLR' (did you mean 'ACE_DUAL_LR'?): it is ignored" in other.stderr
    off = python(root, "train.py", ACE_MODE="off")
    assert trained(off) == (PLAIN, "plain")
    assert off.stderr == "ace: toy_net without a git commit: mode off, plain upstream\n"


def test_what_is_told_and_where(root: Path) -> None:
    patched(root)
    done = python(root, "train.py")
    assert len(done.stdout.splitlines()) == 1, "stdout is the script's"
    banner = (
        "ace: toy_net without a git commit: attached to Net, 1 sites, "
        "20 parameters + 97 of ACE, mode strict, dual lr 0.5 (sgd)"
    )
    assert done.stderr.splitlines()[0] == banner
    assert re.search(r"layer .* (moving|swinging|dying down|fits|at 0|held off)", done.stderr)
    assert len(list((root / ".ace" / "runs").iterdir())) == 1
    assert (root / ".ace" / ".gitignore").read_text() == "*\n"
    quiet = python(root, "train.py", ACE_QUIET="1")
    assert trained(quiet) == trained(done)
    assert quiet.stderr == ""


def test_from_another_folder_and_through_a_link(root: Path, tmp_path: Path) -> None:
    patched(root)
    (tmp_path / "elsewhere").mkdir()
    assert (
        trained(python(tmp_path / "elsewhere", str(root / "train.py"), PYTHONPATH=str(tmp_path / "installed")))[0]
        == WITH_ACE
    )
    (tmp_path / "elsewhere" / "link.py").symlink_to(root / "train.py")
    assert trained(python(tmp_path / "elsewhere", "link.py", PYTHONPATH=str(tmp_path / "installed")))[0] == WITH_ACE


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("from models.net import Net\nimport torch", "upstream first, which imports torch itself"),
        ("import sys; sys.path.insert(0, 'models')\nfrom net import Net\nimport torch", "by its bare name"),
        ("import importlib\nNet = importlib.import_module('models.net').Net\nimport torch", "by importlib"),
        (
            "import sys; sys.path.insert(0, '..')\nfrom clone.models.net import Net\nimport torch",
            "as part of a package",
        ),
    ],
)
def test_whatever_name_the_model_is_imported_under(root: Path, head: str, name: str) -> None:
    script = root / "train.py"
    script.write_text(script.read_text().replace("import torch\nfrom models.net import Net", head))
    patched(root)
    assert trained(python(root, "train.py"))[0] == WITH_ACE, name


def test_a_file_imported_under_two_names_is_patched_under_both_and_once(root: Path) -> None:
    (root / "train.py").write_text(
        "import sys; sys.path.insert(0, 'models')\nimport net, models.net\nfrom models.net import *\n"
        "print(sum(p.numel() for p in net.Net().parameters()), sum(p.numel() for p in Net().parameters()))\n"
    )
    patched(root)
    assert python(root, "train.py").stdout.split() == [str(WITH_ACE), str(WITH_ACE)]


def test_activation_is_light(root: Path) -> None:
    """Nothing heavy is imported for a script that has not asked for it."""
    patched(root)
    heavy = ("torch", "click", "rich", "pluggy", "wrapt", "packaging", "importlib.metadata", "typing")
    source = f"import sys\nprint([name for name in {heavy} if name in sys.modules])\n"
    (root / "train.py").write_text((root / "train.py").read_text().splitlines()[0] + "\n" + source)
    (root / "train.py").write_text("import ace_plugins.activate\n" + source)
    done = python(root, "-S", "-c", "pass")
    assert done.returncode == 0
    loaded = python(root, "-I", "-c", source).stdout
    assert set(eval(python(root, "train.py").stdout)) - set(eval(loaded)) <= {"typing"}


def test_a_checkout_with_folders_in_folders(root: Path) -> None:
    deep = root / "models" / "deep" / "nets"
    deep.mkdir(parents=True)
    (deep / "net.py").write_text(NET)
    (root / "models" / "net.py").unlink()
    adapter = root.parent / "installed" / "ace_toy_net.py"
    adapter.write_text(
        ADAPTER.replace("models/net.py", "models/deep/nets/net.py").replace("models.net:", "models.deep.nets.net:")
    )
    script = root / "train.py"
    head = "import sys; sys.path.insert(0, 'models/deep')\nfrom nets.net import Net\nimport torch"
    script.write_text(script.read_text().replace("import torch\nfrom models.net import Net", head))
    patched(root)
    assert trained(python(root, "train.py"))[0] == WITH_ACE


def test_a_file_of_upstream_that_is_a_link(root: Path) -> None:
    (root / "models" / "net.py").rename(root.parent / "elsewhere.py")
    (root / "models" / "net.py").symlink_to(root.parent / "elsewhere.py")
    patched(root)
    assert trained(python(root, "train.py"))[0] == WITH_ACE


def test_a_file_that_is_loaded_by_its_path_does_not_stop_the_script(root: Path) -> None:
    script = root / "train.py"
    head = (
        "import importlib.util, sys, torch\nspec = importlib.util.spec_from_file_location('mine', 'models/net.py')\n"
        "mine = sys.modules['mine'] = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(mine)\n"
        "Net = mine.Net"
    )
    script.write_text(script.read_text().replace("import torch\nfrom models.net import Net", head))
    patched(root)
    assert python(root, "train.py").returncode == 0


def test_another_import_hook_before_ours_is_told(root: Path) -> None:
    script = root / "train.py"
    head = (
        "import sys\nfrom importlib.machinery import PathFinder\nclass Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return PathFinder.find_spec(name, path, target) if name.startswith('models') else None\n"
        "sys.meta_path.insert(0, Hook())\nimport torch\nfrom models.net import Net"
    )
    script.write_text(script.read_text().replace("import torch\nfrom models.net import Net", head))
    patched(root)
    done = python(root, "train.py")
    assert trained(done) == (PLAIN, "plain")
    assert re.search(r"^ace: models\S* was imported past ACE, so nothing was attached", done.stderr, re.M)


def test_a_script_that_only_shows_its_help_is_left_alone(root: Path) -> None:
    script = root / "train.py"
    head = "import argparse\nfrom models import net\nargparse.ArgumentParser().parse_args()\n"
    script.write_text(head + script.read_text())
    patched(root)
    done = python(root, "train.py", "--help")
    assert done.returncode == 0
    assert done.stderr == ""


def test_without_a_stderr_and_without_a_folder(root: Path) -> None:
    """What cannot be told is not told elsewhere."""
    script = root / "train.py"
    script.write_text(script.read_text() + "    import os, shutil; shutil.rmtree(os.getcwd())\n")
    patched(root)
    (root.parent / "gone").mkdir()
    env = {**os.environ, "PYTHONPATH": str(root.parent / "installed")}
    env = {k: v for k, v in env.items() if not k.startswith("ACE_")}
    command = f"cd '{root.parent / 'gone'}' && '{sys.executable}' '{script}'"
    done = subprocess.run(command + " 2>&-", shell=True, env=env, capture_output=True, text=True, timeout=300)
    assert trained(done)[0] == WITH_ACE
    (root.parent / "gone").mkdir()
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, timeout=300)
    assert "ACE strict, 20 steps" in done.stderr
    assert "Traceback" not in done.stderr


# Processes.

SPAWN = """
if __name__ == "__main__":
    import torch.multiprocessing as mp
    torch.manual_seed(0)
    context = mp.get_context(sys.argv[1])
    if sys.argv[2] == "sent":
        process = context.Process(target=train, args=(Net(),))
    else:
        process = context.Process(target=build_and_train)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("where", ["sent", "built"])
def test_processes_of_the_script_train_with_ace_and_tell_once(root: Path, method: str, where: str) -> None:
    script = root / "train.py"
    body = script.read_text().partition("if __name__")[0]
    script.write_text(body + "def build_and_train():\n    train(Net())\n" + SPAWN)
    patched(root)
    done = python(root, "train.py", method, where)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Net") == 1, done.stderr
    assert done.stderr.count("ACE strict, 20 steps") == 1, done.stderr
    assert "no model" not in done.stderr
    assert "made no step" not in done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_go_by_the_settings_the_script_began_with(root: Path, method: str) -> None:
    script = root / "train.py"
    body = script.read_text().partition("if __name__")[0]
    edit = "    open('ace.toml', 'w').write('mode = broken')\n"
    edited = SPAWN.replace("    torch.manual", edit + "    torch.manual")
    script.write_text(body + "def build_and_train():\n    train(Net())\n" + edited)
    patched(root, "--mode", "resilient")
    done = python(root, "train.py", method, "built", ACE_DUALLR="1")
    assert done.returncode == 0, done.stderr
    assert "ACE resilient, 20 steps" in done.stderr
    assert done.stderr.count("ACE_DUALLR") == (1 if method == "spawn" else done.stderr.count("ACE_DUALLR"))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_data_loader_workers_tell_nothing(root: Path, method: str) -> None:
    script = root / "train.py"
    body = script.read_text().partition("if __name__")[0]
    loader = f"DataLoader(TensorDataset(torch.zeros(4, 4)), num_workers=2, multiprocessing_context={method!r})"
    script.write_text(
        body + "from torch.utils.data import DataLoader, TensorDataset\n"
        f"if __name__ == '__main__':\n    list({loader})\n    train(Net())\n    list({loader})\n"
    )
    patched(root)
    done = python(root, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Net") == 1
    assert done.stderr.count("ACE strict, 20 steps") == 1
    assert len(done.stderr.splitlines()) < 12, done.stderr


def test_run_of_a_marked_script_goes_by_the_command(root: Path) -> None:
    patched(root, "--mode", "resilient")
    done = python(root, "-m", "ace_plugins", "run", "toy_net", "--mode", "strict", "--", "train.py")
    assert trained(done)[0] == WITH_ACE
    assert done.stderr.count("attached to Net") == 1
    assert "mode strict" in done.stderr


# Mistakes.


def ended(root: Path, **environment: str) -> str:
    done = python(root, "train.py", **environment)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ace: ")
    return line


def test_mistakes_end_the_script_with_one_line(root: Path) -> None:
    patched(root)
    settings = root / "ace.toml"
    good = settings.read_text()
    assert "ACE_MODE: unknown mode 'strct'" in ended(root, ACE_MODE="strct")
    assert "ACE_GAMMA_INIT='x': expected a number" in ended(root, ACE_GAMMA_INIT="x")
    assert "ACE_PRESET: unknown preset 'papr'" in ended(root, ACE_PRESET="papr")
    settings.write_text(good.replace("#mode", "mod"))
    line = good.splitlines().index('#mode = "strict"') + 1
    assert f"ace.toml line {line}: unknown setting 'mod'" in ended(root)
    settings.write_text(good.replace("#rho = 1.0", 'rho = "high"'))
    assert "rho 'high': expected a finite number above 0" in ended(root)
    settings.write_text(good.replace('"toy_net"', '"toy_nt"'))
    assert "adapter 'toy_nt', which ace.toml line 5 names, is not installed in this environment" in ended(root)
    settings.unlink()
    assert "there is no ace.toml beside it: run 'ace-patch revert'" in ended(root)


def test_an_error_of_ace_in_a_script_is_one_line_with_its_place(root: Path) -> None:
    script = root / "train.py"
    script.write_text(script.read_text().replace("SGD(model.parameters()", "SGD(model.layer.parameters()"))
    patched(root)
    done = python(root, "train.py")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = script.read_text().splitlines().index("        optimizer.step()") + 1
    assert done.stderr.splitlines()[-1].startswith("ace: ")
    assert done.stderr.splitlines()[-1].endswith(f"(train.py line {line})")


def test_an_error_of_the_script_is_its_own(root: Path) -> None:
    script = root / "train.py"
    script.write_text(script.read_text() + "    raise ValueError('mine')\n")
    patched(root)
    done = python(root, "train.py")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "ace: trace in .ace/runs/" in done.stderr
    assert "verdict" not in done.stderr
