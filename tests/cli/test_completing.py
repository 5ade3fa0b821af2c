"""What the shell offers after TAB."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from clones import python
from toy import ADAPTERS, Layered, LayeredAdapter

from ace_plugins.cli.main import COMMANDS, cli
from ace_plugins.plugins.registry import registry
from ace_plugins.settings.config import KINDS
from ace_plugins.settings.fields import Choice
from ace_plugins.settings.sources import option

VARIABLE = "_ACE_PATCH_COMPLETE"
FILES = ["<file>"]


class Named(LayeredAdapter):
    model = type("Named", (Layered,), {})


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    registry().add(Named(), "named")
    yield
    registry().remove("named")


def offered(line: str) -> list[str]:
    """What is offered for the last word of the line, which is empty after a space."""
    *words, last = line.split(" ")[1:]
    items = BashComplete(cli, {}, "ace-patch", VARIABLE).get_completions(words, last)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]


MODES = ["auto", "strict", "bounded", "resilient", "scheduled", "off"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ace-patch re", ["report", "revert"]),
        ("ace-patch --v", ["--version"]),
        ("ace-patch run nam", ["named"]),
        ("ace-patch run --mode off nam", ["named"]),
        ("ace-patch compare nam", ["<file>", "named"]),
        ("ace-patch doctor nam", ["named"]),
        ("ace-patch doctor named ", FILES),
        ("ace-patch run named --mo", ["--mode"]),
        ("ace-patch run named --mode ", MODES),
        ("ace-patch run named --mode re", ["resilient"]),
        ("ace-patch run named --mode=s", ["strict", "scheduled"]),
        ("ace-patch run --mode ", MODES),
        ("ace-patch run named --log t", ["tensorboard", "trackio"]),
        ("ace-patch run named --rho ", []),
        ("ace-patch run named ", FILES),
        ("ace-patch run named -- ", FILES),
        ("ace-patch run named --mode off -- tr", FILES),
        ("ace-patch compare named --se", ["--seeds"]),
        ("ace-patch compare named -- ", FILES),
        ("ace-patch new", ["new-adapter"]),
        ("ace-patch new-adapter ", []),
        ("ace-patch new-adapter --in", ["--into"]),
    ],
)
def test_what_is_offered(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_commands_and_adapters_are_all_there() -> None:
    assert offered("ace-patch ")[: len(COMMANDS)] == list(COMMANDS)
    assert offered("ace-patch ")[len(COMMANDS) :] == [plugin.name for plugin in registry().with_checkouts]
    usable = [plugin.name for plugin in registry().adapters]
    assert offered("ace-patch run ") == offered("ace-patch doctor ") == usable
    assert {*ADAPTERS, "named"} <= set(usable)
    assert "recorder" not in usable, "an observer is none"


@pytest.mark.parametrize(
    "line",
    [
        "ace-patch run named -- train.py --mode ",
        "ace-patch run named -- train.py --mo",
        "ace-patch run named train.py --mo",
        "ace-patch run --mode off named train.py --mo",
        "ace-patch compare named -- train.py --se",
        "ace-patch compare named -- train.py --seeds ",
    ],
)
def test_the_scripts_own_options_are_not_ours_to_offer(line: str) -> None:
    assert offered(line) == FILES


def test_what_adapters_bring() -> None:
    pytest.importorskip("ace_segnn")
    assert "nbody" in offered("ace-patch data ")
    assert offered("ace-patch data nbdy ") == offered("ace-patch data "), "and no error"
    assert offered("ace-patch segnn --mode re") == ["resilient"]
    pytest.importorskip("ace_schnet")
    assert offered("ace-patch schnet ") == offered("ace-patch nonsense ") == offered("ace-patch "), "and no error"
    pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install torch-geometric")
    assert "schnet" in offered("ace-patch demo ")
    assert offered("ace-patch demo schnet --ta") == ["--target"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if isinstance(kind, Choice)])
def test_a_choice_is_offered_and_listed_in_the_help(name: str) -> None:
    kind = KINDS[name]
    assert isinstance(kind, Choice)
    assert offered(f"ace-patch run named {option(name)} ") == list(kind.choices)
    shown = CliRunner().invoke(cli, ["run", "--help"], terminal_width=400).output
    assert re.search(rf"^ +{option(name)} +{re.escape('|'.join(kind.choices))}(\s|$)", shown, re.MULTILINE), shown


def test_nobody_waits_for_torch() -> None:
    """Of any command, its words and its options."""
    code = (
        "import sys\nfrom click.shell_completion import BashComplete\n"
        "from ace_plugins.cli.main import COMMANDS, cli\nfrom ace_plugins.plugins.registry import registry\n"
        f"shell = BashComplete(cli, {{}}, 'ace-patch', {VARIABLE!r})\n"
        "assert shell.get_completions([], '')\n"
        "for name in [*COMMANDS, *(plugin.name for plugin in registry().with_checkouts)]:\n"
        "    shell.get_completions([name], '')\n"
        "    assert shell.get_completions([name], '--'), name\n"
        "    if 'torch' in sys.modules:\n        sys.exit(f'{name} imports torch')\n"
    )
    done = python(Path(__file__).parents[2], "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash(tmp_path: Path) -> None:
    """As the line in ~/.bashrc has it, with the words that bash would give it."""
    called = 'exec "$PYTHON" -c "from ace_plugins.cli.main import main; main()" "$@"'
    (tmp_path / "ace-patch").write_text(f"#!/bin/sh\n{called}\n")
    (tmp_path / "ace-patch").chmod(0o755)
    script = (
        f'eval "$({VARIABLE}=bash_source ace-patch)"\n'
        "complete -p ace-patch\n"
        'offered() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _ace_patch_completion ace-patch; '
        'echo "${COMPREPLY[*]}"; }\n'
        "offered ace-patch re\n"
        "offered ace-patch run ''\n"
        "offered ace-patch run anything --mode re\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("ACE_")}
    env |= {"PATH": f"{tmp_path}{os.pathsep}{env['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run(["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    registered, *lines = done.stdout.splitlines()
    assert registered.endswith("-F _ace_patch_completion ace-patch")
    here = {"named", *ADAPTERS}
    assert lines[0] == "report revert"
    assert lines[1].split() == [plugin.name for plugin in registry().adapters if plugin.name not in here]
    assert lines[2] == "resilient"
