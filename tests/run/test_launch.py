"""``ace-patch run``: checks before the exec, and what the executed command sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from toy_clone import HEAVY, MAIN, TRAIN, WITH_ACE, Clone, trained

from ace_plugins.adapter import Upstream, hookimpl
from ace_plugins.errors import AceError, ConfigError
from ace_plugins.plugins.registry import registry
from ace_plugins.run.launch import STARTUP, launch

# Before the command: in this process.


class Became(Exception):
    """Raised instead of executing the command."""

    def __init__(self, path: str, argv: list[str], environment: dict[str, str]) -> None:
        self.path, self.argv, self.environment = path, argv, environment


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in a process that raises `Became` instead of executing the command."""

    def execve(*arguments: Any) -> None:
        raise Became(*arguments)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").touch()
    return tmp_path


def became(*words: str, options: dict[str, Any] | None = None, as_json: bool = False) -> Became:
    with pytest.raises(Became) as caught:
        launch("layered", options or {}, words, as_json=as_json)
    return caught.value


def test_the_command_and_its_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([STARTUP, "mine"]))
    monkeypatch.setenv("ACE_RHO", "3")
    monkeypatch.setenv("ACE_RUN", "of a run that this one was started in")
    found = became("main.py", "--mode", "fast", options={"mode": "resilient"}, as_json=True)
    assert capsys.readouterr().err == "", "the variable is no setting that somebody misspelt"
    assert found.path == sys.executable
    assert found.argv[0] == sys.executable
    assert found.argv[-3:] == ["main.py", "--mode", "fast"]
    assert found.environment["PYTHONPATH"] == os.pathsep.join([STARTUP, "mine"])
    asked = json.loads(found.environment["ACE_RUN"])
    assert (asked["adapter"], asked["process"], asked["root"]) == ("layered", os.getpid(), None)
    assert (asked["as_json"], asked["by_command"], asked["models"]) == (True, True, ["toy:Layered"])
    assert (asked["settings"]["mode"], asked["settings"]["rho"]) == ("resilient", 3.0)
    others = ("PYTHONPATH", "ACE_RUN")
    assert {k: v for k, v in found.environment.items() if k not in others} == {
        k: v for k, v in os.environ.items() if k not in others
    }


def test_options_of_the_interpreter_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O", "-Wignore"])
    assert became("main.py", "x").argv == [sys.executable, "-O", "-Wignore", "main.py", "x"]


@pytest.mark.parametrize("word", ["python", "python3.11", sys.executable, "/opt/env/bin/python3"])
def test_the_interpreter_of_a_pasted_command_is_skipped(here: Path, word: str) -> None:
    (here / "python").mkdir()
    assert became(word, "main.py", "-x").argv[-2:] == ["main.py", "-x"]


def test_programs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here / "bin"))
    for path in ("bin/train", "folder/__main__.py"):
        (here / path).parent.mkdir(exist_ok=True)
        (here / path).touch(mode=0o755)
    found = became("train", "-x")
    assert (found.path, found.argv) == (str(here / "bin" / "train"), [str(here / "bin" / "train"), "-x"])
    for words in (["-m", "module"], ["-c", "code"], ["folder"], ["bin/train"]):
        found = became(*words)
        assert found.path == sys.executable
        assert found.argv[-len(words) :] == words


def test_commands_installed_beside_the_interpreter_go_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(here / "bin" / "python"))
    for folder in ("bin", "elsewhere"):
        (here / folder).mkdir()
        for name in ("toy-train", f"only-{folder}"):
            (here / folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(here / "elsewhere"))
    assert became("toy-train", "--fast").argv == [str(here / "bin" / "toy-train"), "--fast"]
    assert became("only-bin").path == str(here / "bin" / "only-bin")
    assert became("only-elsewhere").path == str(here / "elsewhere" / "only-elsewhere")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no script given: expected script.py, -m module, -c code or a command"),
        ([""], "no script given"),
        (["python3"], "no script given"),
        (["python", "-c"], "no script given"),
        (["-"], "'-' is an option, not a script"),
        (["-u", "main.py"], "'-u' is an option, not a script: .*python -u -m ace_plugins run"),
        (["mian.py"], "no script 'mian.py': expected script.py, .*; the current folder is"),
        (["zzz/a.py"], "no script 'zzz/a.py': .*; the current folder is"),
    ],
)
def test_no_such_program(here: Path, words: list[str], expected: str) -> None:
    with pytest.raises(AceError, match=expected) as caught:
        launch("layered", {}, words, as_json=False)
    assert "\n" not in str(caught.value)


class Generic:
    """An adapter that recognises models by a test."""

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("Any", recognises=lambda model: True)


def test_what_is_refused_before_the_command(here: Path) -> None:
    with pytest.raises(AceError, match="unknown adapter 'layerd'.*did you mean 'layered'"):
        launch("layerd", {}, ["main.py"], as_json=False)
    with pytest.raises(ConfigError, match="--mode: unknown mode 'strct'"):
        launch("layered", {"mode": "strct"}, ["main.py"], as_json=False)
    registry().add(Generic(), "generic")
    try:
        with pytest.raises(
            AceError, match=r"adapter 'generic' lists no model classes.*attach\(model, adapter='generic'\)"
        ):
            launch("generic", {}, ["main.py"], as_json=False)
    finally:
        registry().remove("generic")


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as windows:
        windows.setattr("ace_plugins.run.launch.os.name", "nt")
        with pytest.raises(AceError, match="Windows") as caught:
            launch("layered", {}, ["main.py"], as_json=False)
    assert "attach(model)" in str(caught.value)


# The command itself: real processes, compared with plain Python.

SHOW = """
import sys, __main__
print(sys.argv, sys.path, __name__, __file__, __package__, __spec__ and __spec__.name)
print(sorted(vars(__main__)), 'ace_plugins.run.launch' in sys.modules, sys.flags.optimize)
sys.exit(3)
"""


@pytest.mark.parametrize("words", ["-m show", "app.pyz"])
def test_what_the_program_sees_of_itself(clone: Clone, words: str) -> None:
    (clone.root / "show.py").write_text(SHOW)
    with zipfile.ZipFile(clone.root / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    words_of_it = (*words.split(), "a", "--b=c d")
    plain = clone.python("-O", *words_of_it)
    done = clone.python("-O", "-m", "ace_plugins", "run", "toy_net", "--", *words_of_it, ACE_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (3, plain.stdout, "")
    assert "'--b=c d'" in done.stdout


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("def f(x):\n    return 1 / x\nprint('before')\nf(0)\n", 1),
        (
            "import os, signal, atexit\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "atexit.register(print, 'bye')\nos.kill(os.getpid(), signal.SIGINT)",
            -signal.SIGINT,
        ),
    ],
    ids=["traceback", "ctrl-c"],
)
def test_a_script_ends_as_under_python(clone: Clone, source: str, code: int) -> None:
    clone.write(source, marked=False)
    plain, done = clone.python("train.py"), clone.run("--", "train.py")
    assert done.returncode == plain.returncode == code
    assert done.stdout == plain.stdout
    told, _, more = done.stderr.partition("ace: ")
    assert told == plain.stderr
    assert more.startswith(f"no model was attached{' before the error' if code == 1 else ''}: ")


def test_a_python_that_takes_no_environment_is_refused(clone: Clone) -> None:
    code = f"import sys; sys.path[:0] = {sys.path}; from ace_plugins.cli.main import main; main()"
    done = clone.python("-E", "-c", code, "run", "schnet", "--", "-c", "pass")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Python was started with -I, -E or -S" in done.stderr


def test_the_users_own_sitecustomize_has_its_turn(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "sitecustomize.py"
    own.write_text("import sys; sys.own = True")
    clone.write("import sys\nprint(sys.own, sys.modules['sitecustomize'].__file__)\n", marked=False)
    done = clone.run("--mode", "off", "--", "train.py", PYTHONPATH=str(own.parent))
    assert (done.stdout, done.stderr) == (f"True {own}\n", "")


def test_a_sitecustomize_that_fails_is_reported_as_by_python(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import missing_thing")
    plain = clone.python("-c", "print('went on')", PYTHONPATH=str(tmp_path))
    done = clone.python("-c", "print('went on')", PYTHONPATH=f"{STARTUP}:{tmp_path}")
    assert "missing_thing" in plain.stderr
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)


def test_another_python_without_ace_runs_plain(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "ace_plugins").mkdir()
    (tmp_path / "ace_plugins" / "__init__.py").write_text("raise ImportError('not here')")
    done = clone.python("-c", "print('went on')", PYTHONPATH=f"{STARTUP}:{tmp_path}", ACE_RUN="{}")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr == f"ace: nothing is attached in this process of {sys.executable}: not here\n"


def test_a_variable_that_ace_patch_did_not_write_is_ignored(clone: Clone) -> None:
    done = clone.python("-c", "print('went on')", PYTHONPATH=STARTUP, ACE_RUN="runs/")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "ACE_RUN is ignored" in done.stderr


# The command trains.


def test_run_of_a_marked_script_uses_the_settings_of_the_command(clone: Clone) -> None:
    clone.settings.write_text('adapter = "toy_net"\nmode = "resilient"\nrho = 2.5\n')
    done = clone.run("--mode", "strict", "--json", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attached to Net") == 1
    first, told = done.stdout.splitlines()
    assert int(first.split()[0]) == WITH_ACE
    (run,) = json.loads(told)["runs"]
    assert (json.loads(told)["models_attached"], run["mode"], run["steps"], run["landed"]) == (1, "strict", 20, False)
    about = json.loads((clone.root / run["folder"] / "run.json").read_text())
    assert about["config"]["rho"] == 2.5, "what the command does not set is as the checkout's file has it"


def test_a_script_outside_of_the_checkout_and_one_of_many_workers_prints(clone: Clone, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(clone.root)!r})\n{TRAIN}{MAIN}")
    done = clone.run("--json", "--", str(script), RANK="1")
    assert trained(done)[0] == WITH_ACE
    assert done.stderr == ""


CHILDREN = """
import multiprocessing, subprocess, sys
if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", {heavy!r}], check=True)
    train = "import train; train.build_and_train(); print('trained')"
    subprocess.run([sys.executable, "-c", train], check=True)
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(train,))
    process.start()
    process.join()
"""


def test_processes_of_the_command_train_with_its_settings(clone: Clone, tmp_path: Path) -> None:
    """Processes that do not train import little and print nothing."""
    clone.write(TRAIN, marked=False)
    (clone.root / "start.py").write_text(CHILDREN.format(heavy=HEAVY))
    (tmp_path / "tmp").mkdir()
    done = clone.run("--mode", "resilient", "--", "start.py", ACE_DUALLR="1", TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (0, "[]\ntrained\ntrained\n"), done.stderr
    assert done.stderr.count("attached to Net") == 2
    assert done.stderr.count("ACE resilient, 20 steps") == 2
    assert done.stderr.count("ACE_DUALLR") == 1
    assert "no model" not in done.stderr
    assert not list((tmp_path / "tmp").glob("ace-*"))


def test_a_program_on_the_path(clone: Clone, tmp_path: Path) -> None:
    clone.write(TRAIN + MAIN, marked=False)
    (tmp_path / "tmp").mkdir()
    shell = ("sh", "-c", f"'{sys.executable}' train.py; yes | head -n 1; exit 4")
    done = clone.run("--mode", "resilient", "--", *shell, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 4
    assert int(done.stdout.split()[0]) == WITH_ACE
    assert "ACE resilient, 20 steps" in done.stderr
    assert "Broken pipe" not in done.stderr, "Python ignores the signal, other programs count on it"
    assert not list((tmp_path / "tmp").glob("ace-*"))


def test_an_error_before_any_model_was_built_is_reported(clone: Clone) -> None:
    """As under the adapter of another upstream."""
    clone.write("raise ImportError('its own')", marked=False)
    done = clone.run("--", "train.py")
    assert done.returncode == 1
    assert "ImportError: its own" in done.stderr
    assert "no model was attached before the error: this process built none of models.net:Net; " in done.stderr
    assert "toy_net is the wrong adapter" in done.stderr


def test_json_of_a_script_that_builds_no_model(clone: Clone) -> None:
    done = clone.run("--json", "--", "-c", "print('hello')")
    first, told = done.stdout.splitlines()
    assert (first, done.stderr) == ("hello", "")
    assert json.loads(told) == {"adapter": "toy_net", "models_attached": 0, "spawned": False, "runs": []}


def test_a_process_that_only_loads_a_model_prints_nothing_about_training(clone: Clone) -> None:
    """Commands that package a trained model print no second verdict."""
    clone.write(TRAIN + "torch.save(build_and_train().state_dict(), 'trained.pt')\n", marked=False)
    assert "ACE auto" in clone.run("--", "train.py").stderr
    clone.write(
        TRAIN + "model = Net(); model.load_state_dict(torch.load('trained.pt')); print('loaded')\n", marked=False
    )
    done = clone.run("--", "train.py")
    assert done.stdout == "loaded\n"
    assert "attached to Net" in done.stderr
    assert "ACE auto" not in done.stderr
    assert "no training step" not in done.stderr


def test_a_second_model_that_the_best_checkpoint_is_loaded_into_has_no_separate_table(clone: Clone) -> None:
    """Lightning scripts load the best checkpoint into a second model for testing; only the trained one has a table."""
    clone.write(
        TRAIN + "trained = build_and_train(); best = Net(); best.load_state_dict(trained.state_dict())\n", marked=False
    )
    told = clone.run("--", "train.py").stderr
    assert told.count("attached to Net") == 2
    assert told.count("ACE auto") == 1


OLD_ADAPTER = """
import string
from ace_plugins.adapter import Shim, Site, Upstream, hookimpl

@hookimpl
def ace_upstream():
    return Upstream("Old net", ("old_net.net:Net",))

@hookimpl
def ace_layers(model):
    return [Site("layer", "layer", (4,), (4,))]

@hookimpl
def ace_shims():
    def needed():
        return not hasattr(string, "gone")
    return [Shim("gone", "a name that is gone", needed, lambda: setattr(string, "gone", "put back"), first=True)]
"""


def test_a_package_is_repaired_before_it_is_imported(clone: Clone) -> None:
    """The package fails in its first line, before the module with the model is imported."""
    package = clone.installed / "old_net"
    package.mkdir()
    (clone.installed / "ace_toy_net.py").write_text(OLD_ADAPTER)
    (package / "__init__.py").write_text("from string import gone\nfrom old_net.net import Net\n")
    (package / "net.py").write_text((clone.root / "models" / "net.py").read_text())
    clone.write(TRAIN.replace("models.net", "old_net") + MAIN, marked=False)
    assert "cannot import name 'gone'" in clone.python("train.py").stderr
    done = clone.run("--", "train.py")
    assert trained(done)[0] == WITH_ACE
    assert "shims: gone" in done.stderr
    assert "cannot import name 'gone'" in clone.run("--no-shims", "--", "train.py").stderr
