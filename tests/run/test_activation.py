"""A patched script trains with ACE: settings, environment, processes and messages."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from toy_clone import HEAVY, MAIN, MARKED, PLAIN, TRAIN, WITH_ACE, Clone, trained


def test_what_is_told_and_where(clone: Clone) -> None:
    done = clone.python("train.py")
    assert trained(done)[0] == WITH_ACE, "stdout is the script's"
    banner = (
        "ace: toy_net without a git commit: attached to Net, 1 sites, 20 parameters + 97 of ACE, mode auto, budget auto"
    )
    assert done.stderr.splitlines()[:2] == [banner, "ace: budget: unknown, 2,000 steps assumed; set budget"]
    assert "the run ended after 20 of 2,000 expected steps" in done.stderr
    assert "a decision needs at least 120 steps: train longer" in done.stderr
    assert "ACE auto, 20 steps, trace in .ace/runs/" in done.stderr
    assert re.search(r"site .* gamma .* benefit .* p .* verdict", done.stderr)
    assert re.search(r"layer .* %.* undecided", done.stderr)
    assert "undecided: no decision up to this step" in done.stderr
    assert len(list((clone.root / ".ace" / "runs").iterdir())) == 1


def test_settings_come_from_the_file_and_the_environment_goes_before_it(clone: Clone) -> None:
    clone.settings.write_text('adapter = "toy_net"\nmode = "resilient"\n')
    done = clone.python("train.py", ACE_DUAL_LR="0.25", ACE_DUALLR="3", ACE_PRESET="paper")
    assert trained(done)[0] == WITH_ACE
    assert "mode resilient, dual lr 0.25 (sgd)" in done.stderr
    assert "ace: unknown variable 'ACE_DUALLR' (did you mean 'ACE_DUAL_LR'?): it is ignored" in done.stderr
    off = clone.python("train.py", ACE_MODE="off", ACE_LOOP="fitted")
    assert trained(off) == (PLAIN, "plain")
    told = "ace: toy_net without a git commit: mode off, ACE is not attached\n"
    assert off.stderr == f"ace: loop 'fitted' is now called 'paced'; use the new name\n{told}"


def test_tell_is_heeded(clone: Clone) -> None:
    quiet = clone.python("train.py", ACE_TELL="false")
    assert quiet.stderr == ""
    assert clone.run("--no-tell", "--", "train.py").stderr == ""


def test_from_another_folder_through_a_link_after_an_import(clone: Clone, tmp_path: Path) -> None:
    clone.script.write_text("from models.net import Net\n" + MARKED + TRAIN + MAIN)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(clone.script)
    done = clone.python("link.py", folder=tmp_path / "elsewhere", ACE_QUIET="1")
    assert trained(done)[0] == WITH_ACE
    assert done.stderr == ""
    assert (clone.root / ".ace" / "runs").is_dir()


def test_a_file_that_is_imported_under_several_names(clone: Clone) -> None:
    clone.write(
        "import sys; sys.path[1:1] = ['models', '..']\nimport net, models.net, clone.models.net\n"
        "print([sum(p.numel() for p in each.Net().parameters()) for each in (net, models.net, clone.models.net)])\n"
    )
    assert clone.python("train.py").stdout == f"{[WITH_ACE] * 3}\n"


def test_the_marked_line_needs_no_torch(clone: Clone) -> None:
    clone.write(HEAVY)
    done = clone.python("train.py")
    assert (done.stdout, done.stderr) == ("['packaging', 'pluggy']\n", "")


def test_another_import_hook_before_ours_is_told(clone: Clone) -> None:
    hook = (
        "import sys\nfrom importlib.machinery import PathFinder\nclass Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return PathFinder.find_spec(name, path, target) if name.startswith('models') else None\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    clone.write(hook + "from models.net import Net; print(hasattr(Net(), 'ace'))")
    done = clone.python("train.py")
    assert done.stdout == "False\n"
    assert re.search(r"^ace: models\S* was imported by another import hook", done.stderr, re.M)


def test_without_a_folder(clone: Clone, tmp_path: Path) -> None:
    """If the folder is gone, no trace is written elsewhere."""
    clone.write(TRAIN + MAIN + "    import os, shutil; shutil.rmtree(os.getcwd())\n")
    (tmp_path / "gone").mkdir()
    done = clone.python(str(clone.script), folder=tmp_path / "gone")
    assert trained(done)[0] == WITH_ACE
    assert "ACE auto, 20 steps" in done.stderr
    assert "Traceback" not in done.stderr


# Processes.

START = """
if __name__ == "__main__":
    import torch.multiprocessing as mp
    torch.manual_seed(0)
    context = mp.get_context({method!r})
    process = context.Process(target={target})
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize(("method", "target"), [("spawn", "build_and_train"), ("fork", "train, args=(Net(),)")])
def test_processes_of_the_script_train_with_its_settings_and_tell_once(clone: Clone, method: str, target: str) -> None:
    edit = "    open('ace.toml', 'w').write('mode = broken')\n    torch.manual"
    clone.write(TRAIN + START.replace("    torch.manual", edit).format(method=method, target=target))
    clone.settings.write_text('adapter = "toy_net"\nmode = "resilient"\n')
    temporary = clone.root.parent / "tmp"
    temporary.mkdir()
    done = clone.python("train.py", TMPDIR=str(temporary), ACE_DUALLR="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Net") == 1, done.stderr
    assert done.stderr.count("ACE resilient, 20 steps") == 1, done.stderr
    assert done.stderr.count("ACE_DUALLR") == 1
    assert "no training step" not in done.stderr
    assert not [each for each in temporary.iterdir() if each.name.startswith("ace-")]


def test_a_script_that_a_script_starts_is_a_run_of_its_own(clone: Clone) -> None:
    again = (
        "if __name__ == '__main__' and len(sys.argv) == 1:\n    import os, subprocess\n    Net()\n"
        "    environment = {**os.environ, 'ACE_MODE': 'resilient'}\n"
        "    subprocess.run([sys.executable, __file__, 'again'], env=environment, check=True)\n    sys.exit()\n"
    )
    clone.write(TRAIN + again + MAIN)
    done = clone.python("train.py")
    assert done.returncode == 0, done.stderr
    assert re.findall("mode ([a-z]+),", done.stderr) == ["auto", "resilient"]
    assert "unknown variable" not in done.stderr


def test_data_loader_workers_tell_nothing(clone: Clone) -> None:
    loader = "DataLoader(TensorDataset(torch.zeros(4, 4)), num_workers=1, multiprocessing_context={!r})"
    clone.write(
        TRAIN + "from torch.utils.data import DataLoader, TensorDataset\nif __name__ == '__main__':\n"
        f"    list({loader.format('spawn')})\n    build_and_train()\n    list({loader.format('fork')})\n"
    )
    done = clone.python("train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Net") == 1
    assert done.stderr.count("ACE auto, 20 steps") == 1
    assert len(done.stderr.splitlines()) < 12, done.stderr


# Mistakes.


def ended(clone: Clone, **environment: str) -> str:
    done = clone.python("train.py", **environment)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ace: ")
    return line


def test_mistakes_end_the_script_with_one_line(clone: Clone) -> None:
    clone.write("print('went on')\n")
    assert "ACE_MODE: unknown mode 'strct'" in ended(clone, ACE_MODE="strct")
    assert "ACE_PRESET: unknown preset 'papr'" in ended(clone, ACE_PRESET="papr")
    clone.settings.write_text('adapter = "toy_net"\n\nrho = "high"\n')
    assert "ace.toml line 3: rho 'high': expected a finite number above 0" in ended(clone)
    clone.settings.write_text('adapter = "toy_nt"\n')
    assert "ace.toml line 1: adapter 'toy_nt' is not installed" in ended(clone)
    clone.settings.write_text('adapter = "toy_net"\nmod = "strict"\n')
    assert "ace.toml line 2: unknown setting 'mod'" in ended(clone)
    clone.settings.unlink()
    assert "there is no ace.toml" in ended(clone)


def test_an_error_of_the_script_is_its_own(clone: Clone) -> None:
    clone.write(TRAIN + MAIN + "    raise ValueError('mine')\n")
    done = clone.python("train.py")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "ace: trace in .ace/runs/" in done.stderr
    assert "verdict" not in done.stderr


def test_another_importer_of_a_marked_file_gets_the_exception(clone: Clone) -> None:
    clone.settings.unlink()
    clone.script.write_text(MARKED)
    done = clone.python(
        "-c", "from ace_plugins import AceError\ntry:\n    import train\nexcept AceError: print('told')"
    )
    assert done.stdout == "told\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_what_a_cluster_sends_ends_with_the_summary(clone: Clone, number: signal.Signals) -> None:
    """The process then ends by the same signal. An interrupted run gets no advice on its budget."""
    usual = f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)\n"  # under nohup it is ignored
    killed = f"import os\nmodel = build_and_train()\nos.kill(os.getpid(), {int(number)})\nprint('never')"
    clone.write(usual + TRAIN + killed)
    done = clone.python("train.py", ACE_BUDGET="2000")
    assert done.returncode == -number
    assert "ACE auto, 20 of 2,000 steps, interrupted, trace in" in done.stderr
    assert "never" not in done.stdout
    assert "longer" not in done.stderr
    (trace,) = clone.root.glob(".ace/runs/*/trace.jsonl")
    last = json.loads(trace.read_text().splitlines()[-1])
    assert (last.get("finished"), last["interrupted"]) == (None, True)


@pytest.mark.parametrize(("error", "mode"), [("KeyboardInterrupt", "strict"), ("ValueError", "resilient")])
def test_a_run_that_an_error_or_ctrl_c_ends_is_interrupted(clone: Clone, error: str, mode: str) -> None:
    clone.write(TRAIN + f"model = build_and_train()\nraise {error}")
    done = clone.python("train.py", ACE_BUDGET="2000", ACE_MODE=mode)
    assert "longer" not in done.stderr
    told = clone.python("-m", "ace_plugins", "report", "--text").stdout
    assert "20 of 2,000 steps" in told
    assert "interrupted" in told
    assert "finished" not in told
    assert "longer" not in told
    assert "budget =" not in told
    clone.write(TRAIN + f"model = build_and_train()\nraise {error}")
    assert "interrupted" not in clone.python("train.py", ACE_BUDGET="20", ACE_MODE=mode).stderr, "it made all its steps"


CHAINS = """
class Connector:
    \"""Handles SIGTERM as Lightning does: notes it, then calls the handler that was there before.\"""

    def __init__(self):
        self.received = False
        handlers, before = [self.notice], signal.getsignal(signal.SIGTERM)
        handlers += [before] if before not in (None, signal.SIG_DFL) else []
        signal.signal(signal.SIGTERM, lambda *args: [handler(*args) for handler in handlers])

    def notice(self, *args):
        self.received = True

import os, signal, pathlib, sys
model = train(Net(), 5)
connector = Connector()
os.kill(os.getpid(), signal.SIGTERM)
train(model, 1)  # it finishes its batch
assert connector.received
pathlib.Path("on_exception.ckpt").write_text("saved")
sys.exit(143)
"""


@pytest.mark.parametrize("mode", ["off", "strict"])
def test_a_handler_that_comes_later_and_calls_ours_ends_the_process_itself(clone: Clone, mode: str) -> None:
    clone.write(TRAIN + CHAINS)
    done = clone.python("train.py", ACE_MODE=mode, ACE_BUDGET="2000")
    assert done.returncode == 143, done.stderr
    assert (clone.root / "on_exception.ckpt").read_text() == "saved"
    assert done.stderr.count("6 of 2,000 steps, interrupted") == (mode == "strict"), "the summary is printed at exit"


REQUEUES = """
import os, signal, pathlib
model = train(Net(), 5)
# As Lightning does under SLURM: SIGUSR1 saves a checkpoint and requeues the job; SIGTERM is ignored, but chained.
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("hpc_ckpt_1.ckpt").write_text("saved"))
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: before(*args) if callable(before) else None)
for number in (signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), number)
    train(model, 1)
print("requeued")
"""


@pytest.mark.parametrize("mode", ["off", "strict"])
def test_a_job_that_its_cluster_requeues_saves_its_checkpoint_first(clone: Clone, mode: str) -> None:
    clone.write(TRAIN + REQUEUES)
    done = clone.python("train.py", ACE_MODE=mode, ACE_BUDGET="2000")
    assert (done.returncode, done.stdout) == (0, "requeued\n"), done.stderr
    assert (clone.root / "hpc_ckpt_1.ckpt").read_text() == "saved"
    assert done.stderr.count("7 of 2,000 steps, interrupted") == (mode == "strict")


def test_a_handler_of_the_scripts_own_stays(clone: Clone) -> None:
    own = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: print('mine'))\n"
    clone.write(own + TRAIN + "build_and_train()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')")
    done = clone.python("train.py")
    assert done.returncode == 0
    assert done.stdout.split("\n")[:2] == ["mine", "goes on"]
