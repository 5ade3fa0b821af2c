"""Is this folder a checkout of that upstream, and at which commit? Answered by reading files, never by running them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..contract.data import Checkout
from ..errors import AceError
from .marking import unmark
from .shape import differences

_ID = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True)
class Fingerprint:
    """What a folder is, compared with what an adapter patches."""

    known: str | None
    """The commit the adapter was tried on whose files these are."""
    commit: str | None
    """The commit that git has checked out, if this is a git work tree."""
    edited: tuple[str, ...]
    """Where git has a known commit checked out: files that are not as they are in it."""
    differences: tuple[str, ...]
    """Per difference in shape one line. None: the adapter fits."""

    @property
    def fits(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        commit = self.commit or self.known
        at = f"at commit {commit[:7]}" if commit else "without a git commit"
        if self.known:
            return at if commit == self.known else f"{at}, with the files of commit {self.known[:7]}"
        shape = "the same shape" if self.fits else "another shape"
        if self.edited:
            return f"{at} with {', '.join(self.edited)} edited: {shape}"
        return f"{at}, which the adapter was not tried on: {shape}"


def fingerprint(root: Path, checkout: Checkout) -> Fingerprint:
    """Compare a folder with a checkout. Marked scripts count as what they were before."""
    sources = {file: _read(root / file) for file in (*checkout.scripts, *checkout.shape)}
    commit = head(root)
    expected = checkout.commits.get(commit or "", {})
    edited = tuple(file for file, blob in expected.items() if not _is(sources.get(file), blob))
    # Commits may share their files: then it is the one that git has checked out.
    tried = {**({commit: expected} if commit else {}), **checkout.commits}
    known = next((name for name, ids in tried.items() if ids and all(_is(sources.get(f), ids[f]) for f in ids)), None)
    return Fingerprint(known, commit, edited, tuple(_differences(checkout, sources)))


def _differences(checkout: Checkout, sources: Mapping[str, bytes | OSError]) -> Iterator[str]:
    for file, source in sources.items():
        if isinstance(source, (FileNotFoundError, NotADirectoryError)):
            yield f"{file}: expected, not found"
        elif isinstance(source, OSError):
            yield f"{file}: cannot be read ({source.strerror})"
        else:
            for difference in differences(checkout.shape.get(file, ""), source):
                yield f"{file}: {difference}"


def _read(path: Path) -> bytes | OSError:
    try:
        source = path.read_bytes()
    except OSError as error:
        return error
    try:
        return unmark(source)
    except AceError:
        return source


def _is(source: bytes | OSError | None, blob: str) -> bool:
    # A repository may itself hold a file with CRLF.
    return isinstance(source, bytes) and blob in (blob_id(source), _git_id(source))


def blob_id(content: bytes) -> str:
    """What git calls this content, whatever line endings a checkout gave it."""
    return _git_id(content.replace(b"\r\n", b"\n"))


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


def head(root: Path) -> str | None:
    """The commit git has checked out in this folder, read from git's own files: git itself may not be installed."""
    folder = root / ".git"
    try:
        if folder.is_file():  # a linked work tree or a submodule
            folder = Path(root, folder.read_text(encoding="utf-8").partition("gitdir:")[2].strip())
        name = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if not name.startswith("ref:"):
            return name if _ID.fullmatch(name) else None
        name = name[4:].strip()
        common = folder / "commondir"
        shared = Path(folder, common.read_text(encoding="utf-8").strip()) if common.is_file() else folder
        for place in (folder, shared):
            if (place / name).is_file():
                commit = (place / name).read_text(encoding="utf-8").strip()
                return commit if _ID.fullmatch(commit) else None
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}") and _ID.match(line)), None)
