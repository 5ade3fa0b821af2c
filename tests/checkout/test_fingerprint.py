"""What a folder is: known commits by content, edits, other commits, copies, and git's own files however they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ace_plugins import Checkout
from ace_plugins.checkout.fingerprint import Fingerprint, blob_id, fingerprint, head
from ace_plugins.checkout.marking import LINE, mark

MAIN = b'"""Trains."""\nfrom net import Net\n\nNet(3)\n'
NET = b"from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, width): ...\n"
STUB = "class Net(Module):\n    def __init__(self, width): ..."
FIRST, SECOND = "a" * 40, "b" * 40

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def checkout(**commits: dict[str, bytes]) -> Checkout:
    ids = {{"first": FIRST, "second": SECOND}.get(name, name): files for name, files in commits.items()}
    blobs = {commit: {file: blob_id(content) for file, content in files.items()} for commit, files in ids.items()}
    return Checkout("me/net", ("main.py",), {"models/net.py": STUB}, blobs)


TRIED = checkout(first={"main.py": MAIN, "models/net.py": NET})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "models").mkdir(parents=True)
    (folder / "main.py").write_bytes(MAIN)
    (folder / "models/net.py").write_bytes(NET)
    return folder


def at(root: Path, commit: str) -> None:
    """As git writes it in a fresh clone."""
    (root / ".git/refs/heads").mkdir(parents=True, exist_ok=True)
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git/refs/heads/main").write_text(f"{commit}\n")


def git(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    names = {f"GIT_{who}_{what}": "me@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    nowhere = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(cwd)}
    command = ["git", "-c", "init.defaultBranch=main", "-c", "core.autocrlf=false", *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env={**environment, **names, **nowhere}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def committed(root: Path) -> str:
    git("init", "-q", cwd=root)
    git("add", ".", cwd=root)
    git("commit", "-q", "-m", "first", cwd=root)
    return git("rev-parse", "HEAD", cwd=root)


def test_a_known_commit_is_known_by_its_content(root: Path) -> None:
    found = fingerprint(root, TRIED)
    assert found == Fingerprint(known=FIRST, commit=None, edited=(), differences=())
    assert found.fits
    assert str(found) == "at commit aaaaaaa"


def test_a_known_commit_that_git_has_checked_out(root: Path) -> None:
    at(root, FIRST)
    found = fingerprint(root, TRIED)
    assert (found.known, found.commit, found.edited) == (FIRST, FIRST, ())
    assert str(found) == "at commit aaaaaaa"


def test_files_of_a_known_commit_at_another_one(root: Path) -> None:
    at(root, "c" * 40)
    found = fingerprint(root, TRIED)
    assert (found.known, found.commit) == (FIRST, "c" * 40)
    assert str(found) == "at commit ccccccc, with the files of commit aaaaaaa"


def test_of_commits_that_share_their_files_it_is_the_one_that_is_checked_out(root: Path) -> None:
    files = {"main.py": MAIN, "models/net.py": NET}
    both = checkout(first=files, second=files)
    assert fingerprint(root, both).known == FIRST
    at(root, SECOND)
    assert fingerprint(root, both).known == SECOND
    assert str(fingerprint(root, both)) == "at commit bbbbbbb"


def test_a_commit_without_files_is_nobodys(root: Path) -> None:
    assert fingerprint(root, checkout(first={})).known is None
    at(root, FIRST)
    assert fingerprint(root, checkout(first={})).known is None


def test_edited_files_at_a_known_commit(root: Path) -> None:
    at(root, FIRST)
    (root / "main.py").write_bytes(MAIN + b"print('mine')\n")
    found = fingerprint(root, TRIED)
    assert (found.known, found.edited, found.fits) == (None, ("main.py",), True)
    assert str(found) == "at commit aaaaaaa with main.py edited: the same shape"
    (root / "models/net.py").write_bytes(NET.replace(b"width", b"depth"))
    found = fingerprint(root, TRIED)
    assert found.edited == ("main.py", "models/net.py")
    assert found.differences == ("models/net.py: Net.__init__: expected (self, width), found (self, depth)",)
    assert str(found) == "at commit aaaaaaa with main.py, models/net.py edited: another shape"


def test_another_commit_of_the_same_shape(root: Path) -> None:
    at(root, "c" * 40)
    (root / "models/net.py").write_bytes(NET + b"\ndef more(): ...\n")
    found = fingerprint(root, TRIED)
    assert (found.known, found.edited, found.fits) == (None, (), True)
    assert str(found) == "at commit ccccccc, which the adapter was not tried on: the same shape"


def test_a_plain_copy_without_git(root: Path) -> None:
    (root / "main.py").write_bytes(b"pass\n")
    found = fingerprint(root, TRIED)
    assert (found.known, found.commit, found.edited, found.fits) == (None, None, (), True)
    assert str(found) == "without a git commit, which the adapter was not tried on: the same shape"


def test_another_shape_is_told_difference_by_difference(root: Path) -> None:
    (root / "main.py").write_bytes(b"def main(:\n")
    (root / "models/net.py").unlink()
    stub = {"models/net.py": STUB, "train.py": "def train(a): ...\nclass T: ..."}
    (root / "train.py").write_bytes(b"def train(b): ...\n")
    found = fingerprint(root, Checkout("me/net", ("main.py",), stub))
    assert not found.fits
    main, *others = found.differences
    assert main.startswith("main.py: not valid Python in line 1: ")
    assert others == [
        "models/net.py: expected, not found",
        "train.py: train: expected (a), found (b)",
        "train.py: class T(): expected, not found",
    ]


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    missing = ("main.py: expected, not found", "models/net.py: expected, not found")
    assert fingerprint(tmp_path, TRIED).differences == missing
    assert fingerprint(tmp_path / "none", TRIED).differences == missing
    (tmp_path / "file").write_bytes(b"")
    assert fingerprint(tmp_path / "file", TRIED).differences == missing
    (tmp_path / "models").write_bytes(b"not a folder")
    assert fingerprint(tmp_path, TRIED).differences == missing


def test_files_that_cannot_be_read_are_not_called_missing(root: Path) -> None:
    (root / "main.py").unlink()
    (root / "main.py").mkdir()
    (root / "models/net.py").unlink()
    (root / "models/net.py").symlink_to("net.py")
    found = fingerprint(root, TRIED)
    assert found.known is None
    assert found.differences == (
        "main.py: cannot be read (Is a directory)",
        "models/net.py: cannot be read (Too many levels of symbolic links)",
    )


def test_line_endings_of_a_checkout_do_not_count(root: Path) -> None:
    for name in ("main.py", "models/net.py"):
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))
    assert fingerprint(root, TRIED).known == FIRST
    # A repository may hold such a file itself: git's own id is the one of its bytes.
    theirs = {"main.py": "c30dea8a3641ea99b125d04d599d843712292759"}
    (root / "main.py").write_bytes(b"a\r\nb\r\n")
    assert fingerprint(root, Checkout("me/net", ("main.py",), {"models/net.py": STUB}, {FIRST: theirs})).known == FIRST


def test_a_marked_script_counts_as_unmarked(root: Path) -> None:
    at(root, FIRST)
    for ending in (b"\n", b"\r\n"):
        marked = mark(MAIN.replace(b"\n", ending), "main.py")
        assert LINE.encode() in marked
        (root / "main.py").write_bytes(marked)
        assert fingerprint(root, TRIED) == Fingerprint(FIRST, FIRST, (), ())
    (root / "main.py").write_bytes(marked + b"mine()\n")
    assert fingerprint(root, TRIED).edited == ("main.py",)


def test_a_mark_that_cannot_be_taken_out_is_an_edit(root: Path) -> None:
    at(root, FIRST)
    (root / "main.py").write_bytes(MAIN + b"if Net:\n    " + LINE.encode() + b"\n")
    found = fingerprint(root, TRIED)
    assert (found.edited, found.fits) == (("main.py",), True)


def test_nothing_is_executed(root: Path, tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    (root / "main.py").write_text(f"open({str(witness)!r}, 'w')\n")
    fingerprint(root, TRIED)
    assert not witness.exists()


@needs_git
def test_ids_are_those_of_git(tmp_path: Path) -> None:
    for content in (b"", b"a\n", b"a\nb", "caf\xe9\n".encode("latin-1"), b"\0" * 1000):
        (tmp_path / "file").write_bytes(content)
        assert blob_id(content) == git("hash-object", "--no-filters", "file", cwd=tmp_path)
        assert blob_id(content.replace(b"\n", b"\r\n")) == blob_id(content)


@needs_git
def test_heads_as_git_leaves_them(root: Path, tmp_path: Path) -> None:
    commit = committed(root)
    tried = checkout(**{commit: {"main.py": MAIN, "models/net.py": NET}})
    assert fingerprint(root, tried) == Fingerprint(commit, commit, (), ())
    git("worktree", "add", "-q", "-b", "topic/one", tmp_path / "linked", cwd=root)
    git("worktree", "add", "-q", "--detach", tmp_path / "detached", cwd=root)
    places = (root, tmp_path / "linked", tmp_path / "detached")
    assert [head(place) for place in places] == [commit] * 3
    git("pack-refs", "--all", cwd=root)
    assert not (root / ".git/refs/heads/main").exists(), "the ref is only in packed-refs now"
    assert [fingerprint(place, tried).known for place in places] == [commit] * 3
    (tmp_path / "linked/main.py").write_bytes(MAIN + b"pass\n")
    git("commit", "-q", "-a", "-m", "second", cwd=tmp_path / "linked")
    second = git("rev-parse", "HEAD", cwd=tmp_path / "linked")
    assert [head(place) for place in places] == [commit, second, commit], "a newer ref goes before packed-refs"
    git("checkout", "-q", "--detach", cwd=root)
    assert head(root) == commit
    git("tag", "-a", "v1", "-m", "a tag, which packed-refs peels", cwd=root)
    git("checkout", "-q", "main", cwd=root)
    git("pack-refs", "--all", cwd=root)
    assert head(root) == commit
    assert head(root / "models") is None, "a folder of the checkout is not its root"


@needs_git
def test_a_submodule_and_an_empty_repository(root: Path, tmp_path: Path) -> None:
    commit = committed(root)
    outer = tmp_path / "outer"
    outer.mkdir()
    git("init", "-q", cwd=outer)
    assert head(outer) is None, "no commit yet"
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", root, "inner", cwd=outer)
    assert (outer / "inner/.git").is_file()
    assert head(outer / "inner") == commit


@pytest.mark.parametrize(
    "content",
    [
        {".git": b""},
        {".git": b"gitdir: /nowhere/at/all"},
        {".git": b"gitdir: a\0b"},
        {".git": b"\xff\xfe"},
        {".git/HEAD": b""},
        {".git/HEAD": b"\xff\xfe\x00"},
        {".git/HEAD": b"no commit\n"},
        {".git/HEAD": b"A" * 40},
        {".git/HEAD": b"a" * 39},
        {".git/HEAD": b"ref:"},
        {".git/HEAD": b"ref: refs/heads/none"},
        {".git/HEAD": b"ref: refs/\0heads"},
        {".git/HEAD": b"ref: " + b"x" * 5000},
        {".git/HEAD": b"ref: /etc/passwd"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/refs/heads/main": b"garbage"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/refs/heads/main": b"\xff"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/packed-refs": b"\xff\xfe"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/packed-refs": b"\n\nshort refs/heads/main\n"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/packed-refs": b"a" * 40 + b" refs/heads/domain\n"},
        {".git/HEAD": b"ref: refs/heads/main", ".git/commondir": b"a\0b"},
        {".git/HEAD/x": b"a folder"},
    ],
)
def test_garbage_in_git_is_no_commit(root: Path, content: dict[str, bytes]) -> None:
    for name, written in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(written)
    assert head(root) is None
    assert fingerprint(root, TRIED).known == FIRST, "known by content all the same"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50), st.binary(max_size=50))
@example(b"ref: .", b"")
@example(b"ref: ..\n", b"^" + b"a" * 40)
def test_no_head_is_too_odd(root: Path, written: bytes, packed: bytes) -> None:
    (root / ".git").mkdir(exist_ok=True)
    (root / ".git/HEAD").write_bytes(written)
    (root / ".git/packed-refs").write_bytes(packed)
    assert head(root) is None
    (root / ".git/HEAD").write_bytes(b"ref: " + written)
    assert head(root) is None
