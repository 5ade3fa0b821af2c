"""Changes of several files: all or none, whatever stops them; and the file that is written whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.checkout.changes import Change, Plan
from ace_plugins.errors import AceError
from ace_plugins.output import publish


def apply(changes: list[Change]) -> None:
    Plan(changes[0].path.parent, tuple(changes)).apply()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def changes(tmp_path: Path) -> list[Change]:
    """A new file, a changed one and one that goes."""
    (tmp_path / "main.py").write_bytes(b"old\n")
    (tmp_path / "gone.py").write_bytes(b"away\n")
    return [
        Change(tmp_path / "ace.toml", None, b"new\n"),
        Change(tmp_path / "main.py", b"old\n", b"marked\nold\n"),
        Change(tmp_path / "gone.py", b"away\n", None),
    ]


def test_all_of_them(changes: list[Change], tmp_path: Path) -> None:
    apply(changes)
    assert contents(tmp_path) == {"ace.toml": b"new\n", "main.py": b"marked\nold\n"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(("name", "count"), [("replace", 1), ("replace", 2), ("unlink", 1)])
def test_none_of_them_if_one_fails(
    changes: list[Change], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, name: str, count: int
) -> None:
    before, calls = contents(tmp_path), []
    home = {"replace": os, "unlink": Path}[name]
    plain = getattr(home, name)

    def fails(target: Any, *rest: Any, **more: Any) -> None:
        calls.append(target)
        if len(calls) == count if name == "replace" else Path(target).name == "gone.py":
            raise error
        plain(target, *rest, **more)

    monkeypatch.setattr(home, name, fails)
    with pytest.raises((AceError, KeyboardInterrupt)) as caught:
        apply(changes)
    assert calls
    assert contents(tmp_path) == before
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert str(caught.value).endswith("; nothing was changed")


@pytest.mark.parametrize(("name", "now"), [("main.py", b"other\n"), ("main.py", None), ("ace.toml", b"")])
def test_a_file_that_changed_meanwhile(changes: list[Change], tmp_path: Path, name: str, now: bytes | None) -> None:
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if now is not None:
        path.write_bytes(now)
    before = contents(tmp_path)
    with pytest.raises(AceError) as caught:
        apply(changes)
    told = f"{path} has changed since it was read; run the command again; nothing was changed"
    assert str(caught.value) == told
    assert contents(tmp_path) == before


def test_what_is_read_only_stays(changes: list[Change], tmp_path: Path) -> None:
    """Also for the superuser, who could."""
    (tmp_path / "main.py").chmod(0o555)
    before = contents(tmp_path)
    with pytest.raises(AceError, match="main.py is read-only; make it writable or work on a copy; nothing was changed"):
        apply(changes)
    assert contents(tmp_path) == before


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(AceError, match="cannot be read, Is a directory; expected a file; nothing was changed"):
        apply([Change(tmp_path, b"", b"x")])


def test_what_stays_as_it_is_may_be_read_only(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_bytes(b"x")
    path.chmod(0o444)
    apply([Change(path, b"x", b"x")])
    assert contents(tmp_path) == {"main.py": b"x"}


# One file


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        publish(tmp_path / "x", b"content")
    finally:
        os.umask(before)
    assert contents(tmp_path) == {"x": b"content"}
    assert mode(tmp_path / "x") == 0o640


def test_mode_and_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / ("long" * 60)
    target.write_bytes(b"old")
    target.chmod(0o754)
    (tmp_path / "link").symlink_to(target)
    publish(tmp_path / "link", b"new", follow_link=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "folder") == {target.name: b"new"}
    assert mode(target) == 0o754
    publish(tmp_path / "link", b"newer")
    assert contents(tmp_path / "folder") == {target.name: b"new"}
    assert (tmp_path / "link").read_bytes() == b"newer"
    assert not (tmp_path / "link").is_symlink()


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    killed = os.fork()
    if killed == 0:
        publish(tmp_path / "main.py", lambda file: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(killed, 0)
    (left,) = contents(tmp_path)
    other = f".main.py.{os.getppid()}.01234567.part"  # of a process that is alive
    elsewhere = f"{left[:-13]}{int(left[-13:-9], 16) ^ 1:04x}{left[-9:]}"  # of a process on another machine
    stay = sorted([other, elsewhere, ".mine.part"])
    for name in stay:
        (tmp_path / name).write_bytes(b"")
    Plan(tmp_path, ()).apply()
    assert sorted(contents(tmp_path)) == stay, left
    (tmp_path / left).symlink_to(tmp_path / ".mine.part")
    publish(tmp_path / "other", b"")
    assert sorted(contents(tmp_path)) == [*stay, "other"], "a link is removed itself, not its target"


def test_content_may_be_written_by_a_function(tmp_path: Path) -> None:
    def half(file: BinaryIO) -> None:
        file.write(b"ha")
        raise ValueError("its own")

    publish(tmp_path / "x", lambda file: file.write(b"old") and None)
    with pytest.raises(ValueError, match="its own"):
        publish(tmp_path / "x", half)
    assert contents(tmp_path) == {"x": b"old"}, "as it was, and nothing beside it"


@pytest.mark.parametrize(("number", "do"), [(13, "make it writable or work on a copy"), (28, "fix this and try again")])
def test_an_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, do: str) -> None:
    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(AceError) as caught:
        publish(tmp_path / "x", b"content")
    assert str(caught.value) == f"{tmp_path / 'x'} cannot be written: {os.strerror(number)}; {do}"
    assert contents(tmp_path) == {}


# What is shown


LINES = st.lists(st.sampled_from(["", "a", "b", "é文", "+x", "--- a/x", "\t", "\r", "\f"]), max_size=8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.none() | LINES.map("\n".join).map(str.encode).filter(bool)] * 2), max_size=3))
def test_git_reads_the_diff(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[bytes | None, bytes | None]]
) -> None:
    root = tmp_path_factory.mktemp("diff")
    changes = [Change(root / f"{n}.py", before, after) for n, (before, after) in enumerate(contents)]
    for change in changes:
        if change.before is not None:
            change.path.write_bytes(change.before)
    text = Plan(root, tuple(changes)).diff()
    if text:
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_CONFIG_GLOBAL": os.devnull}
        subprocess.run(command, cwd=root, input=text.encode(), env=env, check=True)
    for change in changes:
        assert (change.path.read_bytes() if change.path.exists() else None) == change.after


def test_any_bytes_have_a_diff(tmp_path: Path) -> None:
    text = Plan(tmp_path, (Change(tmp_path / "x", b"\xff\n", b"\xfe"),)).diff()
    assert text == "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\\xff\n+\\xfe\n\\ No newline at end of file\n"
