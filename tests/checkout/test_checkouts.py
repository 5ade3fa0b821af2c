"""Patching a checkout, telling how it is, and taking it back: `ace-patch segnn`, `status`, `revert`."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from clones import git, miniature
from click.testing import CliRunner, Result

pytest.importorskip("ace_segnn", reason="needs the adapter: pip install ./adapters/segnn")

from ace_plugins import Checkout, Upstream, hookimpl
from ace_plugins.checkout import patching as checkouts
from ace_plugins.cli.main import cli
from ace_plugins.settings.config import SETTINGS
from ace_plugins.checkout.marking import LINE
from ace_plugins.plugins.registry import registry
from ace_plugins.settings.file import unchecked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return miniature("segnn", tmp_path)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def patch(root: Path, *arguments: object) -> Result:
    done = call("segnn", root, *arguments)
    assert done.exit_code == 0, done.output
    return done


def refused(*arguments: object) -> str:
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def test_a_patch_is_one_line_and_a_file(root: Path) -> None:
    before = (root / "main.py").read_text()
    done = patch(root)
    assert "which the adapter was not tried on: the same shape" in done.output
    assert "main.py: marked" in done.output
    after = (root / "main.py").read_text()
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [LINE]
    assert after.splitlines().index(LINE) > after.splitlines().index("from __future__ import annotations")
    assert git(root, "status", "--porcelain").split() == ["M", "main.py", "??", "ace.toml"]


def test_the_settings_file_names_every_setting_and_its_default(root: Path) -> None:
    patch(root, "--mode", "resilient")
    text = (root / "ace.toml").read_text()
    for name, field in SETTINGS.items():
        assert re.search(rf"^# {re.escape(field.metadata['help'])}\n#?{name} = ", text, re.MULTILINE), name
    assert '\nmode = "resilient"\n' in text
    assert "\n#dual_lr = 0.0008\n" in text
    assert unchecked(root / "ace.toml").settings == {"mode": "resilient"}


def test_patch_and_revert_leave_nothing(root: Path) -> None:
    before = files(root)
    patch(root)
    done = call("revert", root)
    assert done.exit_code == 0
    assert done.output.splitlines() == ["main.py: the marked line is gone", "ace.toml: removed"]
    assert files(root) == before
    assert git(root, "status", "--porcelain") == ""


def test_patching_twice_changes_nothing_more_and_reverts_at_once(root: Path) -> None:
    before = files(root)
    patch(root)
    once = files(root)
    assert "already marked" in patch(root).output
    assert files(root) == once
    assert call("revert", root).exit_code == 0
    assert files(root) == before
    again = call("revert", root)
    assert again.exit_code == 0
    assert "nothing to revert" in again.output


def test_an_edit_of_the_script_survives_the_revert(root: Path) -> None:
    before = files(root)
    patch(root)
    script = root / "main.py"
    edited = script.read_text().replace("default=100)", "default=7)").replace("import os\n", "import os\nimport sys\n")
    script.write_text(edited)
    assert call("revert", root).exit_code == 0
    expected = before["main.py"].decode().replace("default=100)", "default=7)")
    assert script.read_text() == expected.replace("import os\n", "import os\nimport sys\n")
    assert git(root, "status", "--porcelain").split() == ["M", "main.py"]


def test_edited_settings_are_kept_unless_purged(root: Path) -> None:
    patch(root)
    settings = root / "ace.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    assert "kept ace.toml" in call("revert", root).output
    assert settings.exists()
    assert LINE not in (root / "main.py").read_text()
    assert call("revert", root, "--purge").exit_code == 0
    assert git(root, "status", "--porcelain") == ""


def test_settings_are_updated_only_where_asked(root: Path) -> None:
    patch(root, "--mode", "resilient")
    settings = root / "ace.toml"
    settings.write_text(settings.read_text().replace('mode = "resilient"', 'mode = "resilient"  # as she said'))
    patch(root)
    assert unchecked(settings).settings == {"mode": "resilient"}
    done = patch(root, "--dual-lr", "0.01")
    assert "ace.toml: updated (mode resilient, dual lr 0.01" in done.output
    assert unchecked(settings).settings == {"mode": "resilient", "dual_lr": 0.01}
    assert '\nmode = "resilient"  # as she said\n' in settings.read_text()


def test_settings_changed_by_the_command_alone_still_go(root: Path) -> None:
    patch(root)
    patch(root, "--mode", "resilient", "--trace-every", "5")
    assert call("revert", root).exit_code == 0
    assert git(root, "status", "--porcelain") == ""


def test_a_dry_run_prints_the_diff_and_writes_nothing(root: Path) -> None:
    before = files(root)
    done = patch(root, "--dry-run")
    assert f"+{LINE}" in done.output
    assert "--- a/main.py\n+++ b/main.py\n" in done.output
    assert "+++ b/ace.toml" in done.output
    assert files(root) == before
    (root / "plan.diff").write_text(done.output)
    git(root, "apply", "plan.diff")
    (root / "plan.diff").unlink()
    by_hand = files(root)
    shutil.copy(root / "main.py", root / "kept.txt")
    git(root, "checkout", "-q", "main.py")
    (root / "ace.toml").unlink()
    (root / "kept.txt").unlink()
    patch(root)
    assert files(root) == by_hand
    assert f"-{LINE}" in call("revert", root, "--dry-run").output
    assert files(root) == by_hand


def test_line_endings_mode_and_missing_newline_are_kept(root: Path) -> None:
    script = root / "main.py"
    source = script.read_bytes().replace(b"\n", b"\r\n").rstrip()
    script.write_bytes(source)
    script.chmod(0o755)
    patch(root)
    marked = script.read_bytes()
    assert LINE.encode() + b"\r\n" in marked
    assert b"\n" not in marked.replace(b"\r\n", b"")
    assert not marked.endswith(b"\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert call("revert", root).exit_code == 0
    assert script.read_bytes() == source
    assert stat.S_IMODE(script.stat().st_mode) == 0o755


def test_through_links_and_on_paths_with_spaces(root: Path, tmp_path: Path) -> None:
    spaced = tmp_path / "my work" / "a clone"
    spaced.parent.mkdir()
    root.rename(spaced)
    (spaced / "the real main.py").write_bytes((spaced / "main.py").read_bytes())
    (spaced / "main.py").unlink()
    (spaced / "main.py").symlink_to("the real main.py")
    link = tmp_path / "link"
    link.symlink_to(spaced)
    patch(link)
    assert (spaced / "main.py").is_symlink()
    assert LINE in (spaced / "the real main.py").read_text()
    assert "main.py: patched" in call("status", spaced).output
    assert call("revert", link).exit_code == 0
    assert (spaced / "main.py").is_symlink()
    assert LINE not in (spaced / "the real main.py").read_text()
    assert not (spaced / "ace.toml").exists()


def test_in_a_plain_copy_and_in_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / ".git")
    monkeypatch.chdir(root)
    done = call("segnn")
    assert done.exit_code == 0
    assert "without a git commit" in done.output
    assert call("revert").exit_code == 0


def test_status_tells_whose_it_is_and_how(root: Path) -> None:
    done = call("status", root)
    assert done.exit_code == 0
    assert "main.py: not patched" in done.output
    assert "'ace-patch segnn' patches it" in done.output
    patch(root, "--mode", "resilient")
    told = json.loads(call("status", root, "--json").output)
    assert told["adapter"] == "segnn"
    assert told["patched"] is True
    assert told["settings"] == {"mode": "resilient"}
    assert told["config"]["dual_lr"] == 0.0008
    assert told["edited"] is False
    assert told["commit"] == git(root, "rev-parse", "HEAD").strip()
    (root / "ace.toml").write_text((root / "ace.toml").read_text() + "# mine\n")
    assert "ace.toml: edited (mode resilient" in call("status", root).output


def test_json_of_patch_and_revert(root: Path) -> None:
    told = json.loads(patch(root, "--json").output)
    assert told["changed"] == ["ace.toml", "main.py"]
    assert told["known"] is None
    assert told["dry_run"] is False
    assert json.loads(call("revert", root, "--json").output)["changed"] == ["main.py", "ace.toml"]


def test_a_checkout_inside_a_checkout_is_left_alone(root: Path) -> None:
    inner = miniature("segnn", root / "nbody")
    patch(root)
    patch(inner)
    assert call("revert", root).exit_code == 0
    assert LINE in (inner / "main.py").read_text()


def test_revert_keeps_to_its_own_checkout(root: Path, tmp_path: Path) -> None:
    patch(root)
    (root / "ace.toml").unlink()
    before = files(tmp_path)
    assert "nothing to revert" in call("revert", tmp_path).output
    assert files(tmp_path) == before
    patch(root)
    told = refused("revert", root / "nbody")
    assert f"did you mean {str(root)!r}?" in told
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "ace.toml").write_text("x = 1\n")
    assert "kept ace.toml: it is not a file of ace-patch" in call("revert", tmp_path / "foreign", "--purge").output
    assert (tmp_path / "foreign" / "ace.toml").exists()


def test_revert_leaves_environments_alone(root: Path) -> None:
    patch(root)
    library = root / "venv" / "lib"
    library.mkdir(parents=True)
    (root / "venv" / "pyvenv.cfg").write_text("")
    (library / "other.py").write_text(LINE + "\n")
    assert call("revert", root).exit_code == 0
    assert (library / "other.py").read_text() == LINE + "\n"


def test_a_script_that_cannot_be_read_does_not_stop_the_revert(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(root)
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == "utils.py":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    done = call("revert", root)
    assert done.exit_code == 0
    assert "kept utils.py: it cannot be read (Permission denied)" in done.output
    monkeypatch.undo()
    assert git(root, "status", "--porcelain") == ""


def test_of_two_that_patch_at_once_one_does(root: Path) -> None:
    """Each plans before either has written."""
    plans = [checkouts.patching(root, registry().adapter("segnn"), {}) for _ in range(2)]
    plans[0].carry_out()
    after = files(root)
    with pytest.raises(checkouts.AceError, match="has changed since it was read|exists"):
        plans[1].carry_out()
    assert files(root) == after


def test_two_processes_that_patch_at_once(root: Path) -> None:
    words = [sys.executable, "-m", "ace_plugins", "segnn", str(root)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    codes = [each.wait(120) for each in both]
    for each in both:
        each.communicate()
    assert 0 in codes
    assert LINE in (root / "main.py").read_text()
    assert (root / "ace.toml").exists()


def test_help_lists_the_checkouts() -> None:
    done = call("--help")
    assert re.search(r"Checkouts:\n(?: +\w+ +Patch.*\n)* +segnn +Patch a checkout of SEGNN", done.output)
    assert "RobDHess/Steerable-E3-GNN" in " ".join(call("segnn", "--help").output.split())


# What is refused, and that nothing is changed by it.


def test_not_a_checkout(tmp_path: Path, root: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing").mkdir()
    told = refused("segnn", tmp_path / "empty")
    assert "is not a checkout of RobDHess/Steerable-E3-GNN" in told
    assert "expected main.py, models/segnn/segnn.py" in told
    assert list((tmp_path / "empty").iterdir()) == []
    assert f"did you mean {str(root)!r}?" in refused("segnn", tmp_path)
    assert f"did you mean {str(root)!r}?" in refused("segnn", root / "models")
    assert "expected a folder, found nothing there" in refused("segnn", tmp_path / "nowhere")
    assert "expected a folder, found a file" in refused("segnn", root / "main.py")
    assert "upstream that an adapter patches: expected one of" in refused("status", tmp_path / "nothing")
    assert f"did you mean {str(root)!r}?" in refused("status", root / "nbody")


def test_another_repository_and_half_of_one(root: Path) -> None:
    (root / "models" / "segnn" / "segnn.py").write_text(
        "class SEGNN:\n    def __init__(self, input_irreps, hidden): ...\n    def forward(self, graph): ...\n"
    )
    (root / "qm9" / "train.py").unlink()
    before = files(root)
    told = refused("segnn", root).splitlines()
    assert "has not the shape of a checkout of RobDHess/Steerable-E3-GNN" in told[0]
    assert "  models/segnn/segnn.py: class SEGNN: expected bases (Module), found ()" in told
    assert any(
        line.startswith("  models/segnn/segnn.py: SEGNN.__init__: expected (self, input_irreps") for line in told
    )
    assert any("class SEGNNLayer(MessagePassing): expected, not found" in line for line in told)
    assert "  qm9/train.py: expected, not found" in told
    assert files(root) == before


def test_a_further_optional_argument_is_accepted(root: Path) -> None:
    model = root / "models" / "segnn" / "segnn.py"
    source = model.read_text()
    model.write_text(
        source.replace(
            "additional_message_irreps=None,\n    ):", "additional_message_irreps=None,\n        mine=0,\n    ):"
        )
    )
    assert model.read_text() != source
    patch(root)


def test_a_script_with_a_syntax_error(root: Path) -> None:
    (root / "main.py").write_text("import torch\ndef broken(:\n")
    before = files(root)
    assert "main.py: not valid Python in line 2" in refused("segnn", root)
    assert files(root) == before


def test_a_file_that_changes_between_plan_and_write(root: Path) -> None:
    plan = checkouts.patching(root, registry().adapter("segnn"), {})
    (root / "main.py").write_text("print('changed meanwhile')\n")
    before = files(root)
    with pytest.raises(checkouts.AceError, match="main.py has changed since it was read"):
        plan.carry_out()
    assert files(root) == before


def test_a_write_that_fails_half_way_restores_everything(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(root)
    replace, calls = os.replace, []

    def fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        assert "No space left on device" in refused("segnn", root)
    assert files(root) == before


def test_a_read_only_tree(root: Path) -> None:
    (root / "main.py").chmod(0o444)
    told = refused("segnn", root)
    assert "main.py" in told
    assert "read-only" in told
    assert not (root / "ace.toml").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('mod = "strict"', "ace.toml line 2: unknown setting 'mod'"),
        ('mode = "strct"', "ace.toml line 2: unknown mode 'strct'"),
        ("gamma_init = true", "ace.toml line 2: gamma_init True: expected a finite number"),
        ('land_at = "10"', "ace.toml line 2: land_at '10': expected an integer"),
        ("mode = ", "ace.toml line 2: not valid TOML"),
        ('preset = "papr"', "ace.toml line 2: unknown preset 'papr'"),
        ("[mode]", "ace.toml line 2: unknown mode {}"),
    ],
)
def test_bad_settings_are_told_with_their_line(root: Path, line: str, expected: str) -> None:
    (root / "ace.toml").write_text(f'adapter = "segnn"\n{line}\n')
    before = files(root)
    assert expected in refused("segnn", root)
    told = call("status", root)
    assert told.exit_code == 1
    assert f"problem: {expected}" in told.output
    assert "main.py: not patched" in told.output
    assert files(root) == before


def test_an_option_replaces_the_line_that_is_wrong(root: Path) -> None:
    (root / "ace.toml").write_text('adapter = "segnn"\nmode = "resilent"\n')
    patch(root, "--mode", "resilient")
    assert unchecked(root / "ace.toml").settings == {"mode": "resilient"}


def test_status_of_a_script_that_would_stop(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(root)
    monkeypatch.setenv("ACE_MODE", "off")
    assert "ACE_MODE=off in this shell goes before ace.toml" in call("status", root).output
    (root / "ace.toml").unlink()
    told = call("status", root)
    assert told.exit_code == 1
    assert "main.py: patched" in told.output
    assert "problem: ace.toml: missing, so that patched scripts stop; 'ace-patch segnn' writes it again" in told.output


def test_a_dual_optimizer_that_is_not_installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "find_spec", lambda name: None)
    assert "needs cooper-optim, found none installed" in refused("segnn", root, "--dual-optimizer", "nupi")
    assert not (root / "ace.toml").exists()


def test_bad_flags(root: Path) -> None:
    before = files(root)
    assert "unknown mode 'strct'" in refused("segnn", root, "--mode", "strct")
    assert "unknown command 'sgnn': did you mean 'segnn'?" in refused("sgnn", root)
    assert files(root) == before


class Rival:
    """Another adapter for the same checkout."""

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("Rival", ("models.segnn.segnn:SEGNN",), Checkout("a/rival", ("main.py",), {"utils.py": ""}))

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Any]:
        return []


def test_two_adapters_claiming_one_checkout(root: Path) -> None:
    registry().add(Rival(), "rival")
    try:
        told = refused("status", root)
        assert "several adapters claim" in told
        assert "rival" in told
        assert "segnn" in told
        patch(root)
        before = files(root)
        told = refused("rival", root)
        assert "is patched for adapter 'segnn' (ace.toml line 5), not 'rival'" in told
        assert files(root) == before
        assert "main.py: patched" in call("status", root).output
    finally:
        registry().remove("rival")
