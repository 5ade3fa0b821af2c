"""Changing files: all or none, whatever fails and whenever; and the diff that shows it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.errors import AceError
from ace_plugins.checkout.writing import Change, apply, diff

posix = pytest.mark.skipif(os.name == "nt", reason="modes and links as POSIX has them")
not_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() == 0, reason="nothing is denied to root")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
NAMES = ["main.py", "with space.py", "ümläut 文.py", "tool.sh", "new.py", "gone.py", "same.py"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "check out ü"
    (root / "deep").mkdir(parents=True)
    for name in NAMES:
        if name != "new.py":
            (root / name).write_bytes(f"old {name}\r\n".encode())
    (root / "tool.sh").chmod(0o755)
    (root / "gone.py").chmod(0o640)
    for path in root.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    return root


def plan(root: Path) -> list[Change]:
    """Four files that change, one that comes, one that goes, one that stays."""
    changes = []
    for name in NAMES:
        path = root / name
        before = path.read_bytes() if path.exists() else None
        after = {"gone.py": None, "same.py": before}.get(name, f"new {name}\n".encode())
        changes.append(Change(path, before, after))
    return changes


def state(root: Path) -> dict[str, tuple[int, bytes | str, int]]:
    """Everything there is: mode, content and time of every file, and where links point."""
    found: dict[str, tuple[int, bytes | str, int]] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = (about.st_mode, content, 0 if path.is_dir() else about.st_mtime_ns)
    return found


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: BaseException, late: bool
) -> Iterator[list[int]]:
    """``os.name`` fails at its n-th call, before or after it has done its work; how often it was called."""
    true: Callable[..., Any] = getattr(os, name)
    calls = [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not late:
            raise error
        result = true(*args, **kwargs)
        if calls[0] == at:
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        yield calls


def test_changes_are_made(tree: Path) -> None:
    changes, before = plan(tree), state(tree)
    apply(changes)
    assert contents(tree) == {change.path.name: change.after for change in changes if change.after is not None}
    assert state(tree)["same.py"] == before["same.py"]
    for name in ("main.py", "tool.sh"):
        assert stat.S_IMODE((tree / name).stat().st_mode) == stat.S_IMODE(before[name][0])
    apply([])
    apply([Change(change.path, change.after, change.before) for change in changes])
    assert {n: s[:2] for n, s in state(tree).items() if n != "gone.py"} == {
        n: s[:2] for n, s in before.items() if n != "gone.py"
    }
    assert (tree / "gone.py").read_bytes() == b"old gone.py\r\n"


@posix
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_honours_the_umask(tree: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        apply([Change(tree / "new.py", None, b"x"), Change(tree / "tool.sh", b"old tool.sh\r\n", b"y")])
    finally:
        os.umask(old)
    assert stat.S_IMODE((tree / "new.py").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tree / "tool.sh").stat().st_mode) == 0o755


def test_what_does_not_change_is_not_touched(tree: Path) -> None:
    (tree / "main.py").chmod(0o444)  # nobody asks whether it could be written
    before, inode = state(tree), (tree / "main.py").stat().st_ino
    apply([Change(tree / "main.py", b"old main.py\r\n", b"old main.py\r\n"), Change(tree / "new.py", None, None)])
    assert state(tree) == before
    assert (tree / "main.py").stat().st_ino == inode


FAILURES = [
    OSError(errno.EIO, "Input/output error"),
    KeyboardInterrupt(),
    SystemExit(3),
    ValueError("odd"),
    MemoryError(),
]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["open", "fsync", "chmod", "utime", "replace"])
def test_all_or_none(tree: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, late: bool) -> None:
    changes, before = plan(tree), state(tree)
    expected = AceError if isinstance(error, OSError) else type(error)
    for at in range(1, 99):
        with failing(monkeypatch, name, at, error, late) as calls:
            try:
                apply(changes)
            except expected as caught:
                failed: BaseException | None = caught
            else:
                failed = None
        if calls[0] < at:
            break
        assert failed is error if expected is not AceError else str(failed).endswith("; nothing was changed")
        assert state(tree) == before
    assert at > 4
    assert failed is None
    assert sorted(contents(tree)) == sorted(change.path.name for change in changes if change.after is not None)


@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_second_interrupt_does_not_stop_the_putting_back(
    tree: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    before = state(tree)
    true, calls = os.replace, [0]

    def interrupted(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] in (4, 4 + again):
            raise KeyboardInterrupt
        true(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply(plan(tree))
    assert state(tree) == before


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_what_cannot_be_put_back_is_kept_and_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    true, calls = os.replace, [0]

    def broken(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise error
        true(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(AceError, match="main.py could not be put back, its old content is in ") as caught:
            apply(plan(tree))
    assert "nothing was changed" not in str(caught.value)
    assert "\n" not in str(caught.value)
    kept = Path(str(caught.value).rpartition(" is in ")[2])
    assert kept.parent == tree
    assert kept.name.startswith(".main.py.ace-")
    assert kept.read_bytes() == b"old main.py\r\n"
    kept.unlink()
    assert {*contents(tree)} == {*NAMES} - {"new.py"}


def test_failing_to_tidy_up_is_no_failure(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = plan(tree)
    for name in ("unlink", "remove"):
        monkeypatch.setattr(os, name, lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    apply(changes)
    assert (tree / "main.py").read_bytes() == b"new main.py\n"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("main.py", lambda path: path.write_bytes(b"other"), "main.py has changed since it was read; run"),
        ("tool.sh", lambda path: path.unlink(), "tool.sh has changed since it was read (it is gone); run"),
        ("gone.py", lambda path: path.write_bytes(b"other"), "gone.py has changed since it was read; run"),
        ("same.py", lambda path: path.write_bytes(b"other"), "same.py has changed since it was read; run"),
        (
            "new.py",
            lambda path: path.write_bytes(b"other"),
            "new.py has changed since it was read (it did not exist); ",
        ),
    ],
)
def test_a_file_that_changed_since(tree: Path, name: str, change: Callable[[Path], object], message: str) -> None:
    changes = plan(tree)
    change(tree / name)
    before = state(tree)
    with pytest.raises(AceError) as caught:
        apply(changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tree / name))
    assert str(caught.value).endswith("run the command again; nothing was changed")
    assert state(tree) == before


@pytest.mark.parametrize("name", [name for name in NAMES if name != "same.py"])
def test_a_file_that_changes_while_others_are_replaced(tree: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Just before its turn: what somebody else wrote is not lost, and the others are put back."""
    changes, before = plan(tree), state(tree)
    turn = [n for n in NAMES if n != "same.py"].index(name)
    true, calls = os.replace if turn else os.fsync, [0]

    def meddling(*args: Any) -> None:
        true(*args)
        calls[0] += 1
        if calls[0] == max(turn, 1):
            (tree / name).write_bytes(b"theirs")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace" if turn else "fsync", meddling)
        with pytest.raises(AceError, match="has changed since it was read"):
            apply(changes)
    assert (tree / name).read_bytes() == b"theirs"
    after = state(tree)
    assert after.pop(name)[1] == b"theirs"
    before.pop(name, None)
    assert after == before


@posix
@pytest.mark.parametrize("name", ["main.py", "gone.py"])
def test_a_read_only_file_is_refused(tree: Path, name: str) -> None:
    (tree / name).chmod(0o444)
    changes, before = plan(tree), state(tree)
    with pytest.raises(AceError, match=f"{name} cannot be changed, it is read-only; .*; nothing was changed$"):
        apply(changes)
    assert state(tree) == before


@posix
@pytest.mark.parametrize("name", ["main.py", "gone.py", "new.py"])
def test_a_read_only_folder_is_refused(tree: Path, name: str) -> None:
    changes, before = [c for c in plan(tree) if c.path.name == name], state(tree)
    tree.chmod(0o555)
    try:
        with pytest.raises(AceError, match=f"{name} cannot be changed, its folder .* is read-only; .* was changed$"):
            apply(changes)
    finally:
        tree.chmod(0o755)
    assert state(tree) == before


@posix
@not_root
def test_a_folder_of_others_is_refused(tree: Path) -> None:
    changes = plan(tree)
    tree.chmod(0o577)  # by its bits others may write, its owner may not
    try:
        with pytest.raises(AceError, match="read-only"):
            apply(changes)
    finally:
        tree.chmod(0o755)


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("open", errno.EROFS, "Read-only file system"),
        ("open", errno.EACCES, "Permission denied"),
        ("replace", errno.EPERM, "Operation not permitted"),
        ("fsync", errno.EROFS, "Read-only file system"),
    ],
)
def test_read_only_as_the_write_says(
    tree: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    changes, before = plan(tree), state(tree)
    with (
        failing(monkeypatch, call, 1, OSError(number, words), late=False),
        pytest.raises(AceError, match=rf"main.py cannot be changed, it is read-only \({words}\); .* was changed$"),
    ):
        apply(changes)
    assert state(tree) == before


def test_no_access_by_what_the_system_says(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, before = plan(tree), state(tree)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "main.py")
    with pytest.raises(AceError, match="main.py cannot be changed, it is read-only"):
        apply(changes)
    assert state(tree) == before


def test_a_full_disk(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, before = plan(tree), state(tree)
    with (
        failing(monkeypatch, "fsync", 5, OSError(errno.ENOSPC, "No space left on device"), late=False),
        pytest.raises(AceError, match=r"cannot be changed \(No space left on device\); .*; nothing was changed$"),
    ):
        apply(changes)
    assert state(tree) == before


@posix
def test_links_stay_and_what_they_point_to_changes(tree: Path, tmp_path: Path) -> None:
    (tree / "deep" / "true.py").write_bytes(b"old")
    (tree / "deep" / "true.py").chmod(0o750)
    (tree / "link.py").symlink_to("deep/true.py")
    (tree / "twice.py").symlink_to("link.py")
    (tmp_path / "elsewhere").symlink_to(tree)
    apply(
        [
            Change(tree / "twice.py", b"old", b"new"),
            Change(tmp_path / "elsewhere" / "main.py", b"old main.py\r\n", b"x"),
        ]
    )
    assert os.readlink(tree / "twice.py") == "link.py"
    assert os.readlink(tree / "link.py") == "deep/true.py"
    assert (tmp_path / "elsewhere").is_symlink()
    assert (tree / "deep" / "true.py").read_bytes() == b"new"
    assert stat.S_IMODE((tree / "deep" / "true.py").stat().st_mode) == 0o750
    assert (tree / "main.py").read_bytes() == b"x"
    assert [path.name for path in (tree / "deep").iterdir()] == ["true.py"]


@posix
def test_links_that_lead_nowhere_are_refused(tree: Path) -> None:
    (tree / "broken.py").symlink_to("nonesuch.py")
    (tree / "circle.py").symlink_to("circle.py")
    before = state(tree)
    with pytest.raises(AceError, match="broken.py is a link to .*nonesuch.py, expected that to exist; .* was changed$"):
        apply([Change(tree / "broken.py", None, b"new")])
    with pytest.raises(AceError, match="circle.py cannot be changed .*; nothing was changed$"):
        apply([Change(tree / "circle.py", None, b"new")])
    assert state(tree) == before


def test_every_file_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    one = Change(tree / "main.py", b"old main.py\r\n", b"new")
    twins = [tree / "main.py", tree / "deep" / ".." / "main.py", Path("main.py")]
    if os.name != "nt":
        (tree / "link.py").symlink_to("main.py")
        os.link(tree / "main.py", tree / "hard.py")
        twins += [tree / "link.py", tree / "hard.py"]
    before = state(tree)
    for twin in twins:
        with pytest.raises(AceError, match="is to be changed twice, expected every file once .* nothing was changed$"):
            apply([one, Change(twin, b"old main.py\r\n", b"other")])
    with pytest.raises(AceError, match="new.py is to be changed twice"):
        apply([Change(Path("new.py"), None, b"a"), Change(tree / "new.py", None, b"b")])
    assert state(tree) == before


def test_only_files(tree: Path) -> None:
    before = state(tree)
    with pytest.raises(AceError, match="deep is a folder, expected a file; .*; nothing was changed$"):
        apply([Change(tree / "deep", None, b"new")])
    with pytest.raises(AceError, match="no/new.py has no folder to be in, expected .*no to exist; .* was changed$"):
        apply([Change(tree / "no" / "new.py", None, b"new")])
    with pytest.raises(AceError, match="new.py cannot be changed .*; nothing was changed$"):
        apply([Change(tree / "main.py" / "new.py", None, b"new")])
    if hasattr(os, "mkfifo"):
        os.mkfifo(tree / "pipe")
        with pytest.raises(AceError, match="pipe is not a regular file"):
            apply([Change(tree / "pipe", b"", b"new")])
        (tree / "pipe").unlink()
    assert state(tree) == before


def test_relative_paths_and_long_names(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    long = Path("ü" * 120 + ".py")
    apply([Change(long, None, b"a"), Change(Path("main.py"), b"old main.py\r\n", b"b")])
    apply([Change(long, b"a", b"c")])
    assert long.read_bytes() == b"c"
    assert Path("main.py").read_bytes() == b"b"
    assert [path.name for path in tree.iterdir() if path.name.startswith(".")] == []


def test_the_diff(tmp_path: Path) -> None:
    numbers = b"".join(b"%d\n" % n for n in range(9))
    changes = [
        Change(tmp_path / "main.py", numbers, numbers.replace(b"4\n", b"4\nnew\n")),
        Change(tmp_path / "same.py", b"x", b"x"),
        Change(tmp_path / "sub folder" / "ü.py", b"a\r\nb", b"a\r\nc\fd"),
        Change(tmp_path / "new file.py", None, b"x\n"),
        Change(tmp_path / "gone.py", b"x\ry", None),
        Change(tmp_path / "latin.py", b"\xe9\n", b"\xe9\nx\n"),
        Change(tmp_path / "empty.py", None, b""),
    ]
    assert diff(changes, tmp_path).split("\n") == [
        "--- a/main.py",
        "+++ b/main.py",
        "@@ -3,6 +3,7 @@",
        *[" 2", " 3", " 4", "+new", " 5", " 6", " 7"],
        "--- a/sub folder/ü.py\t",
        "+++ b/sub folder/ü.py\t",
        "@@ -1,2 +1,2 @@",
        " a\r",
        "-b",
        "\\ No newline at end of file",
        "+c\fd",
        "\\ No newline at end of file",
        "--- /dev/null",
        "+++ b/new file.py\t",
        "@@ -0,0 +1 @@",
        "+x",
        "--- a/gone.py",
        "+++ /dev/null",
        "@@ -1 +0,0 @@",
        "-x\ry",
        "\\ No newline at end of file",
        "--- a/latin.py",
        "+++ b/latin.py",
        "@@ -1 +1,2 @@",
        " é",
        "+x",
        "--- /dev/null",
        "+++ b/empty.py",
        "",
    ]
    assert diff([], tmp_path) == ""
    assert diff(changes[1:2], tmp_path) == ""


def test_the_diff_of_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert diff([Change(Path("x.py"), b"", b"1\n")], tmp_path).startswith("--- a/sub/x.py\n+++ b/sub/x.py\n")
    assert diff([Change(tmp_path / "sub" / "x.py", b"", b"1\n")], Path(".")).startswith("--- a/x.py\n+++ b/x.py\n")


@given(st.binary(max_size=40), st.binary(max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_bytes_have_a_diff(before: bytes, after: bytes) -> None:
    text = diff([Change(Path("x"), before, after)], Path("."))
    assert bool(text) == (before != after)
    text.encode("utf-8")  # it can be printed


TEXTS = st.lists(st.sampled_from(["", "a", "b", "é文", "+x", "-y", "\\ no", "--- a/x", "@@", "  ", "\t"]), max_size=12)


@needs_git
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.none() | TEXTS.map("\n".join).map(str.encode)] * 2), min_size=1, max_size=4))
def test_git_reads_the_diff(contents: list[tuple[bytes | None, bytes | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        changes = []
        for n, (before, after) in enumerate(contents):
            if not before and not after:
                continue  # an empty file that comes or goes is more than a unified diff can say
            path = root / ["main.py", "with space.py", "ü 文.py", "sub/tool.py"][n]
            path.parent.mkdir(exist_ok=True)
            if before is not None:
                path.write_bytes(before)
            changes.append(Change(path, before, after))
        text = diff(changes, root)
        if text:
            env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_CONFIG_GLOBAL": os.devnull}
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            ran = subprocess.run(command, cwd=root, input=text.encode(), capture_output=True, env=env, check=False)
            assert ran.returncode == 0, ran.stderr.decode() + text
        for change in changes:
            assert (change.path.read_bytes() if change.path.exists() else None) == change.after
