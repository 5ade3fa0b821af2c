"""Change several files, all of them or none, and show the changes beforehand."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import AceError


@dataclass(frozen=True)
class Change:
    """What a file holds and what it is to hold. Of a link, the file it points to changes and the link stays."""

    path: Path
    before: bytes | None  # None: it must not exist
    after: bytes | None  # None: it goes


@dataclass(frozen=True)
class _Step:
    change: Change
    target: Path
    found: os.stat_result | None
    # Hidden neighbours of the target, so that either can be moved over it:
    fresh: Path  # the new content, or the removed file
    spare: Path  # the old content, written beforehand, so that putting it back needs no room on the disk

    @property
    def changes(self) -> bool:
        return self.change.before != self.change.after


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the system can: of two that patch at once, the later sees what the first did."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):  # another system, or a file system without locks
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def apply(changes: Sequence[Change]) -> None:
    """Make the changes. If one cannot be made, or on an interrupt, all files are again as they were."""
    steps: list[_Step] = []
    begun: list[_Step] = []
    kept: list[_Step] = []
    try:
        steps.extend(map(_plan, changes))
        _check_distinct(steps)
        for step in steps:
            _check_content(step)
        steps = [step for step in steps if step.changes]
        for step in steps:
            _check_writable(step)
        for step in steps:
            _stage(step)
        for step in steps:
            _check_content(step)
            begun.append(step)  # before it happens: an interrupt may come right after
            _commit(step)
    except BaseException as error:
        kept = [step for step in reversed(begun) if not _insist(partial(_undo, step))]
        outcome = "; ".join(map(_leftover, kept)) or "nothing was changed"
        if isinstance(error, AceError):
            raise AceError(f"{error}; {outcome}") from error.__cause__
        if kept:
            raise AceError(f"stopped half-way by {type(error).__name__}; {outcome}") from error
        raise
    finally:
        for step in steps:
            if step not in kept:
                _insist(partial(step.fresh.unlink, missing_ok=True))
                _insist(partial(step.spare.unlink, missing_ok=True))


def diff(changes: Sequence[Change], root: Path) -> str:
    """The changes as a unified diff, with paths from ``root``. What is not UTF-8 is shown as if it were Latin-1."""
    return "".join(line for change in changes if change.before != change.after for line in _diff(change, root))


def _plan(change: Change) -> _Step:
    path = change.path
    target = Path(os.path.realpath(path))
    with _explained(path):
        try:
            found = os.stat(target)
        except FileNotFoundError:
            found = None
    if found is None and os.path.islink(path):
        raise AceError(f"{path} is a link to {target}, expected that to exist; mend the link")
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise AceError(f"{path} is {kind}, expected a file; name the file")
    hidden = str(target.parent / f".{target.name[:40]}.ace-")  # long names have no room for more
    return _Step(change, target, found, Path(hidden + secrets.token_hex(4)), Path(hidden + secrets.token_hex(4)))


def _check_distinct(steps: Sequence[_Step]) -> None:
    seen: dict[object, Path] = {}
    for step in steps:
        # Two names may be one file: links, or upper and lower case where that makes no difference.
        key = step.target if step.found is None else (step.found.st_dev, step.found.st_ino)
        if key in seen:
            raise AceError(
                f"{step.change.path} is to be changed twice, expected every file once (also given as {seen[key]}); "
                "leave one out"
            )
        seen[key] = step.change.path


def _check_content(step: _Step) -> None:
    path, before = step.change.path, step.change.before
    with _explained(path):
        try:
            now = step.target.read_bytes()
        except FileNotFoundError:
            now = None
    if now != before:
        how = " (it is gone)" if now is None else " (it did not exist)" if before is None else ""
        raise AceError(f"{path} has changed since it was read{how}; run the command again")


def _check_writable(step: _Step) -> None:
    path, folder = step.change.path, step.target.parent
    if not folder.is_dir():
        raise AceError(f"{path} has no folder to be in, expected {folder} to exist; make it first")
    places = {folder: f"its folder {folder}"}
    if step.found is not None:
        places[step.target] = "it"
    for place, what in places.items():
        with _explained(path):
            mode = os.stat(place).st_mode
        # The superuser may write anything; that nobody may is still a wish to be honoured.
        if not mode & 0o222 or not os.access(place, os.W_OK):
            raise AceError(f"{path} cannot be changed, {what} is read-only; make it writable or work on a copy")


def _stage(step: _Step) -> None:
    before, after = step.change.before, step.change.after
    if after is None:
        return
    with _explained(step.change.path):
        _write(step.fresh, after, step.found)
        if before is not None and step.found is not None:
            _write(step.spare, before, step.found)
            os.utime(step.spare, ns=(step.found.st_atime_ns, step.found.st_mtime_ns))


def _write(path: Path, content: bytes, like: os.stat_result | None) -> None:
    def opener(name: str, flags: int) -> int:
        # A new file has what the umask leaves; one like another is nobody else's until it has that one's mode.
        return os.open(name, flags, 0o666 if like is None else 0o600)

    with open(path, "xb", opener=opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if like is not None:
        with contextlib.suppress(OSError, AttributeError):  # not everyone may, not every system can
            os.chown(path, like.st_uid, like.st_gid)
        os.chmod(path, stat.S_IMODE(like.st_mode))  # last, for a change of owner clears some bits


def _commit(step: _Step) -> None:
    with _explained(step.change.path):
        if step.change.after is None:
            os.replace(step.target, step.fresh)
        else:
            os.replace(step.fresh, step.target)


def _undo(step: _Step) -> None:
    """Put back what ``_commit`` did, if it did; again does no harm."""
    moved = step.fresh.exists() == (step.change.after is None)
    if not moved:
        return
    if step.change.after is None:
        os.replace(step.fresh, step.target)
    elif step.change.before is None:
        step.target.unlink(missing_ok=True)
    elif step.spare.exists():
        os.replace(step.spare, step.target)


def _leftover(step: _Step) -> str:
    path, change = step.change.path, step.change
    if change.before is None:
        return f"{path} was made and could not be removed, remove it"
    return f"{path} could not be put back, its old content is in {step.fresh if change.after is None else step.spare}"


def _insist(action: Callable[[], object]) -> bool:
    """Do it, once more if the first time is interrupted; whether it is done."""
    for _ in range(2):
        with contextlib.suppress(BaseException):
            action()
            return True
    return False


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            reason = f"{path} cannot be changed, it is read-only ({why}); make it writable or work on a copy"
        else:
            reason = f"{path} cannot be changed ({why}); mend that and run the command again"
        raise AceError(reason) from error


def _diff(change: Change, root: Path) -> Iterator[str]:
    name = Path(os.path.relpath(change.path, root)).as_posix()
    before, after = _lines(change)
    tab = "\t" if " " in name else ""  # ends a name with spaces in it
    old = "/dev/null" if change.before is None else f"a/{name}{tab}"
    new = "/dev/null" if change.after is None else f"b/{name}{tab}"
    if not before and not after:  # an empty file that comes or goes: no lines to show, but to be named
        yield f"--- {old}\n+++ {new}\n"
    for line in difflib.unified_diff(before, after, old, new):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(change: Change) -> tuple[list[str], list[str]]:
    both = (change.before or b"", change.after or b"")
    try:
        texts = [content.decode("utf-8") for content in both]
    except UnicodeDecodeError:
        texts = [content.decode("latin-1") for content in both]
    # At \n alone, as diff and git do; splitlines knows many more.
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts)
    return before, after
