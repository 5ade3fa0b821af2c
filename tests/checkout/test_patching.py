"""Patching a checkout, telling how it is, and taking it back: `ace-patch segnn`, `status`, `revert`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from clones import git, miniature

pytest.importorskip("ace_segnn", reason="needs the adapter: pip install ./adapters/segnn")

from ace_plugins import Config
from ace_plugins.adapter import Checkout, Upstream, hookimpl
from ace_plugins.checkout.marking import LINE
from ace_plugins.cli.main import cli
from ace_plugins.plugins.registry import registry
from ace_plugins.settings.toml_file import read


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def patch(root: Path, *arguments: object) -> Result:
    done = call("segnn", root, *arguments)
    assert done.exit_code == 0, done.output
    return done


def revert(root: Path, *arguments: object) -> Result:
    done = call("revert", root, *arguments)
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


def changed(root: Path) -> list[str]:
    """What git sees."""
    return git(root, "status", "--porcelain").splitlines()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that nobody patches."""
    return miniature("segnn", tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Result]]:
    """One that was patched with --mode resilient, and what was told. Tests only read it."""
    root = miniature("segnn", tmp_path_factory.mktemp("patched"))
    done = patch(root, "--mode", "resilient")
    before = files(root)
    yield root, done
    assert files(root) == before


@pytest.fixture
def root(clone: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clone, tmp_path / "segnn"))


# Patching


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_settings_are_validated_once(root: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    if again:
        patch(root, "--mode", "bounded")
    validated: list[Config] = []
    validate = Config.__post_init__
    monkeypatch.setattr(Config, "__post_init__", lambda config: (validated.append(config), validate(config))[1])
    patch(root, "--mode", "resilient", "--rho", "2")
    assert [(config.mode, config.rho) for config in validated] == [("resilient", 2.0)]


def test_a_patch_is_one_line_and_a_file(patched: tuple[Path, Result], clone: Path) -> None:
    root, done = patched
    assert changed(root) == [" M main.py", "?? ace.toml"]
    before, after = ((each / "main.py").read_text().splitlines() for each in (clone, root))
    at = after.index(LINE)
    assert after[:at] + after[at + 1 :] == before
    assert "from __future__ import annotations" in after[:at]
    assert re.search("at commit .*, which the adapter was not tested on: the layout is the expected one", done.output)
    assert "main.py: marked (one line)" in done.output
    assert "ace.toml: written (mode resilient" in done.output
    assert read(root / "ace.toml").settings == {"mode": "resilient"}
    assert '\n#loop = "paced"\n' in (root / "ace.toml").read_text(), "that of the preset"


def test_patching_again_changes_nothing_and_one_revert_leaves_nothing(root: Path) -> None:
    before = files(root)
    patch(root)
    once = files(root)
    assert "already marked" in patch(root).output
    assert files(root) == once
    assert revert(root).output.splitlines() == ["main.py: marked line removed", "ace.toml: removed"]
    assert files(root) == before
    assert "nothing to revert" in revert(root).output


def test_a_dry_run_prints_a_diff_that_git_applies(root: Path, patched: tuple[Path, Result]) -> None:
    before = files(root)
    told = patch(root, "--mode", "resilient", "--dry-run").output
    assert files(root) == before
    (root.parent / "plan.diff").write_text(told)
    git(root, "apply", "../plan.diff")
    assert files(root) == files(patched[0])
    assert f"-{LINE}" in revert(root, "--dry-run").output
    assert files(root) == files(patched[0])


def test_settings_are_updated_only_where_asked(root: Path) -> None:
    patch(root, "--mode", "resilient")
    settings = root / "ace.toml"
    settings.write_text(settings.read_text().replace('mode = "resilient"', 'mode = "resilient"  # as she said'))
    patch(root)
    assert read(settings).settings == {"mode": "resilient"}
    done = patch(root, "--budget", "6 epochs")
    assert "ace.toml: updated (mode resilient, budget 6 epochs" in done.output
    assert read(settings).settings == {"mode": "resilient", "budget": "6 epochs"}
    assert "as she said" not in settings.read_text(), "the command writes the file again"


def test_an_option_replaces_the_line_that_is_wrong(root: Path) -> None:
    (root / "ace.toml").write_text('adapter = "segnn"\nmode = "resilent"\n')
    patch(root, "--mode", "resilient")
    assert read(root / "ace.toml").settings == {"mode": "resilient"}


def test_bytes_and_mode_are_kept(root: Path) -> None:
    """Windows' line endings, no newline at the end, an executable script, a settings file as some editors save it."""
    script, settings = root / "main.py", root / "ace.toml"
    source = script.read_bytes().replace(b"\n", b"\r\n").rstrip()
    script.write_bytes(source)
    script.chmod(0o755)
    settings.write_bytes(b'\xef\xbb\xbfadapter = "segnn"\r\nrho = 2.0 # mine\r\n')
    patch(root, "--rho", "3")
    marked = script.read_bytes()
    assert LINE.encode() + b"\r\n" in marked
    assert not marked.endswith(b"\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert read(settings).settings == {"rho": 3.0}
    revert(root)
    assert script.read_bytes() == source
    assert stat.S_IMODE(script.stat().st_mode) == 0o755


def test_through_links_and_on_paths_with_spaces(root: Path, tmp_path: Path) -> None:
    spaced = tmp_path / "my work"
    root.rename(spaced)
    (spaced / "main.py").rename(spaced / "the real main.py")
    (spaced / "main.py").symlink_to("the real main.py")
    (tmp_path / "link").symlink_to(spaced)
    patch(tmp_path / "link")
    assert (spaced / "main.py").is_symlink()
    assert LINE in (spaced / "the real main.py").read_text()
    assert "main.py: patched" in call("status", spaced).output
    revert(tmp_path / "link")
    assert (spaced / "main.py").is_symlink()
    assert LINE not in (spaced / "the real main.py").read_text()
    assert not (spaced / "ace.toml").exists()


def test_in_a_plain_copy_and_in_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / ".git")
    monkeypatch.chdir(root)
    assert "without a git commit" in patch(Path(".")).output
    assert call("revert").exit_code == 0
    assert not (root / "ace.toml").exists()


def test_json_of_patch_and_revert(root: Path) -> None:
    told = json.loads(patch(root, "--json").output)
    assert (told["changed"], told["tried"], told["dry_run"]) == (["ace.toml", "main.py"], False, False)
    assert told["commit"] == git(root, "rev-parse", "HEAD").strip()
    assert json.loads(revert(root, "--json").output)["changed"] == ["main.py", "ace.toml"]


def test_help_lists_the_checkouts() -> None:
    assert re.search(r"Checkouts:\n(?: +\w+ +Patch.*\n)* +segnn +Patch a checkout of SEGNN", call("--help").output)
    assert "RobDHess/Steerable-E3-GNN" in " ".join(call("segnn", "--help").output.split())


# Reverting


def test_an_edit_of_the_script_survives_the_revert(root: Path) -> None:
    script = root / "main.py"
    edited = script.read_text().replace("default=100)", "default=7)").replace("import os\n", "import os\nimport sys\n")
    patch(root)
    text = script.read_text()
    script.write_text(text.replace("default=100)", "default=7)").replace("import os\n", "import os\nimport sys\n"))
    revert(root)
    assert script.read_text() == edited
    assert changed(root) == [" M main.py"]


def test_edited_settings_are_kept_unless_purged(root: Path) -> None:
    patch(root)
    patch(root, "--mode", "resilient", "--trace-every", "5")
    revert(root)
    assert changed(root) == [], "settings that only the command changed go"
    patch(root)
    (root / "ace.toml").write_text((root / "ace.toml").read_text() + "# mine\n")
    assert "kept ace.toml: it was edited; 'ace-patch revert --purge' removes it too" in revert(root).output
    assert changed(root) == ["?? ace.toml"]
    revert(root, "--purge")
    assert changed(root) == []


def test_revert_leaves_out_folders_that_may_not_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(root)
    private, real = root / "private", os.stat
    private.mkdir()

    def refusing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and Path(path).parent == private:
            raise PermissionError(errno.EACCES, "denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    revert(root)
    assert LINE not in (root / "main.py").read_text()


def test_revert_keeps_to_its_own_checkout(root: Path, clone: Path, tmp_path: Path) -> None:
    inner = Path(shutil.copytree(clone, root / "nbody" / "inner"))
    library = root / "venv" / "lib" / "other.py"
    library.parent.mkdir(parents=True)
    (root / "venv" / "pyvenv.cfg").write_text("")
    library.write_text(f"{LINE}\n")
    patch(root)
    patch(inner)
    before = files(tmp_path)
    assert refused("revert", tmp_path), "no checkout, as 'status' says too"
    assert f"did you mean {str(root)!r}?" in refused("revert", root / "models")
    assert files(tmp_path) == before
    revert(root)
    assert LINE not in (root / "main.py").read_text()
    assert LINE in (inner / "main.py").read_text()
    assert library.read_text() == f"{LINE}\n"


def test_an_ace_toml_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ace.toml").write_text("x = 1\n")
    assert "kept ace.toml: it is not a file of ace-patch" in revert(tmp_path, "--purge").output
    assert (tmp_path / "ace.toml").exists()


def test_links_that_lead_out_are_never_followed(root: Path, tmp_path: Path) -> None:
    """A script or settings shared by several clones are not one clone's to change, or to remove."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (root / "main.py").rename(shared / "main.py")
    (root / "main.py").symlink_to(shared / "main.py")
    before = files(tmp_path)
    assert "main.py is a link to" in refused("segnn", root)
    assert files(tmp_path) == before
    (root / "main.py").unlink()
    shutil.copy(shared / "main.py", root / "main.py")
    patch(root)
    (root / "ace.toml").rename(shared / "ace.toml")
    (root / "ace.toml").symlink_to(shared / "ace.toml")
    (root / "linked.py").symlink_to(shared / "other.py")
    (shared / "other.py").write_text(f"{LINE}\n")
    assert "ace.toml is a link to" in refused("segnn", root)
    assert "kept ace.toml: it is a link that leads out of the checkout" in revert(root, "--purge").output
    assert (shared / "ace.toml").is_file()
    assert (shared / "other.py").read_text() == f"{LINE}\n"
    assert LINE not in (root / "main.py").read_text()


# Status


def test_status_shows_adapter_and_state(clone: Path, patched: tuple[Path, Result]) -> None:
    told = call("status", clone)
    assert told.exit_code == 0
    assert "main.py: not patched" in told.output
    assert "'ace-patch segnn' patches it" in told.output
    found = json.loads(call("status", patched[0], "--json").output)
    assert (found["adapter"], found["patched"], found["tried"], found["edited"]) == ("segnn", True, False, False)
    assert found["settings"] == {"mode": "resilient"}
    assert found["config"]["loop"] == "paced"
    assert found["commit"] == git(patched[0], "rev-parse", "HEAD").strip()


def test_status_of_what_was_edited(root: Path) -> None:
    patch(root)
    settings = root / "ace.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    assert "ace.toml: edited (mode auto" in call("status", root).output
    settings.unlink()
    told = call("status", root)
    assert told.exit_code == 1
    assert "main.py: patched" in told.output
    assert "problem: ace.toml: missing, so patched scripts stop; 'ace-patch segnn' writes it again" in told.output


def test_status_shows_the_environment(patched: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACE_MODE", "off")
    assert "ACE_MODE=off in this shell overrides ace.toml" in call("status", patched[0]).output
    monkeypatch.setenv("ACE_RHO", "much")
    assert "problem: ACE_RHO='much': expected a finite number above 0" in call("status", patched[0]).output


# What is refused; nothing is changed by it


def test_not_a_checkout(clone: Path, tmp_path: Path) -> None:
    told = refused("segnn", tmp_path)
    assert "is not a checkout of RobDHess/Steerable-E3-GNN" in told
    assert "main.py: expected, not found" in told
    assert "is not a checkout that an adapter patches: expected one of" in refused("status", tmp_path)
    for near in (clone.parent, clone / "models"):
        assert f"did you mean {str(clone)!r}?" in refused("segnn", near)
    assert f"did you mean {str(clone)!r}?" in refused("status", clone / "nbody")
    assert "expected a folder, found nothing there" in refused("segnn", tmp_path / "nowhere")
    assert "expected a folder, found a file" in refused("segnn", clone / "main.py")
    assert list(tmp_path.iterdir()) == []
    assert changed(clone) == []


def test_another_layout_is_refused_difference_by_difference(root: Path) -> None:
    (root / "models" / "segnn" / "segnn.py").write_text("class SEGNN:\n    def __init__(self, hidden): ...\n")
    (root / "qm9" / "train.py").unlink()
    (root / "main.py").write_text("import torch\ndef broken(:\n")
    before = files(root)
    told = refused("segnn", root).splitlines()
    assert "is not a checkout of RobDHess/Steerable-E3-GNN" in told[0]
    assert "  main.py: not valid Python: invalid syntax (line 2)" in told
    assert "  models/segnn/segnn.py: class SEGNN: expected (Module), found ()" in told
    assert "  models/segnn/segnn.py: class SEGNNLayer(MessagePassing): expected, not found" in told
    assert "  qm9/train.py: expected, not found" in told
    assert files(root) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('mod = "strict"', "ace.toml line 2: unknown setting 'mod'"),
        ('mode = "strct"', "ace.toml line 2: unknown mode 'strct'"),
        ("mode = ", "ace.toml: not valid TOML: "),
        ('preset = "papr"', "ace.toml line 2: unknown preset 'papr'"),
    ],
)
def test_bad_settings_are_reported_with_their_line(root: Path, line: str, expected: str) -> None:
    (root / "ace.toml").write_text(f'adapter = "segnn"\n{line}\n')
    before = files(root)
    assert expected in refused("segnn", root)
    told = call("status", root)
    assert told.exit_code == 1
    assert f"problem: {expected}" in told.output
    assert "main.py: not patched" in told.output
    assert files(root) == before


def test_bad_options(clone: Path) -> None:
    assert "--mode: unknown mode 'strct'" in refused("segnn", clone, "--mode", "strct")
    assert "--device: " in refused("segnn", clone, "--device", "gpu")
    assert "'--land-at': '1e3': expected an integer of at least 0." in refused("segnn", clone, "--land-at", "1e3")
    assert "unknown command 'sgnn': did you mean 'segnn'?" in refused("sgnn", clone)
    assert changed(clone) == []


class Rival:
    """Another adapter for the same checkout."""

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("Rival", ("models.segnn.segnn:SEGNN",), Checkout("a/rival", ("main.py",), {"utils.py": ""}))

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Any]:
        return []


def test_two_adapters_claiming_one_checkout(clone: Path, patched: tuple[Path, Result]) -> None:
    registry().add(Rival(), "rival")
    try:
        told = refused("status", clone)
        assert "several adapters support" in told
        assert "rival" in told
        assert "segnn" in told
        assert "is patched for adapter 'segnn' (ace.toml line 6), not 'rival'" in refused("rival", patched[0])
        assert "main.py: patched" in call("status", patched[0]).output
    finally:
        registry().remove("rival")
