"""A folder of its own for each run: code copied, data linked, so that what scripts write never meets.

What a script writes goes to its own folder, since every folder is made anew. Only large files are links. Files that
scripts like to write again, such as checkpoints, are copied whatever their size.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AceError

LARGE = 2**20
"""Bytes from which a file counts as data."""
WRITTEN = (".pt", ".pth", ".ckpt", ".t7", ".model", ".tar", ".log")
SKIPPED = frozenset({".git", ".hg", ".svn", ".ace", ".tox", ".venv", "venv", "__pycache__", "node_modules"})
OURS = "comparison.json"
"""A folder with this file is one of ours, and not copied."""
SPARE = 50 * 2**20
"""Bytes that are left free beside what is copied."""


@dataclass
class Contents:
    """The files of a folder, named from it."""

    root: Path
    copied: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    bytes: int = 0
    """Of those that are copied."""

    @classmethod
    def of(cls, root: Path) -> Contents:
        found = cls(root)
        for path in _files(root):
            about = path.stat()
            name = path.relative_to(root).as_posix()
            if about.st_size >= LARGE and path.suffix not in WRITTEN:
                found.linked.append(name)
            else:
                found.copied.append(name)
                found.bytes += about.st_size
        return found

    def fingerprint(self) -> str:
        """Of the code by its contents, of data by size and time: another one is another experiment.

        In a clone, code is what git knows and every Python file; what runs have left there does not count.
        """
        digest = hashlib.sha256()
        tracked = _tracked(self.root)
        for name in sorted(n for n in self.copied if tracked is None or n in tracked or n.endswith((".py", ".toml"))):
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes() + b"\0")
        digest.update(repr(self.state_of_data()).encode())
        return digest.hexdigest()

    def state_of_data(self) -> list[tuple[str, int, int]]:
        stats = [(name, os.stat(self.root / name)) for name in sorted(self.linked)]
        return [(name, about.st_size, about.st_mtime_ns) for name, about in stats]

    def lay_out(self, target: Path) -> None:
        """Copies and links, in a folder that is made for them."""
        try:
            for name in (*self.copied, *self.linked):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            for name in self.copied:
                shutil.copy2(self.root / name, target / name)
            for name in self.linked:
                (target / name).symlink_to((self.root / name).resolve())
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            why = "no space is left on the disk" if error.errno == errno.ENOSPC else str(error.strerror or error)
            raise AceError(f"{self.root} cannot be copied to {target}: {why}; give another folder with --out") from None

    def check_space(self, target: Path, times: int) -> None:
        """Before anything is started."""
        free = shutil.disk_usage(target).free
        wanted = times * self.bytes + SPARE
        if free < wanted:
            raise AceError(
                f"{target}: expected {_size(wanted)} free for {times} copies of {self.root}, found {_size(free)}; "
                "give another folder with --out"
            )


def _tracked(root: Path) -> set[str] | None:
    """What git knows in this folder; None if it is no clone, or there is no git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return set(os.fsdecode(done.stdout).split("\0"))


def _files(root: Path) -> Iterator[Path]:
    """All of them, through links to folders too, each folder once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or OURS in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.endswith(".pyc"):
                yield path


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
