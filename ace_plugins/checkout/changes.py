"""Changes several files, either all of them or none, and formats the changes as a diff."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..errors import AceError
from ..output import publish, sweep


@dataclass(frozen=True)
class Change:
    """The old and the new content of a file. For a link, the contents of the file that it points to."""

    path: Path
    before: bytes | None  # old content; None if the file must not exist yet
    after: bytes | None  # new content; None to remove the file

    def check(self) -> None:
        """Raise an AceError if the file has changed since it was read, or is read-only (also if the user is root)."""
        if read_content(self.path) != self.before:
            raise AceError(f"{self.path} has changed since it was read; run the command again")
        if self.before not in (None, self.after) and not self.path.stat().st_mode & 0o222:
            raise AceError(f"{self.path} is read-only; make it writable or work on a copy")


@dataclass(frozen=True)
class Plan:
    """Planned changes to a checkout. No file changes until ``apply()`` is called."""

    root: Path
    changes: tuple[Change, ...]
    kept: tuple[str, ...] = ()
    """One line for each file that stays although the user may expect its removal: its name and the reason."""

    @property
    def changed(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.before != change.after)

    def name(self, change: Change) -> str:
        return change.path.relative_to(self.root).as_posix()

    def apply(self) -> None:
        """Make the changes. After an error or an interrupt, every file gets its old content back."""
        begun: list[Change] = []
        try:
            for change in self.changes:
                change.check()
            for change in self.changed:
                begun.append(change)  # before the write, in case an interrupt follows it
                _write(change.path, change.after)
        except BaseException as error:
            for change in reversed(begun):
                if read_content(change.path) != change.before:
                    _write(change.path, change.before)
            if isinstance(error, AceError):
                raise AceError(f"{error}; nothing was changed") from error
            raise
        for folder in {self.root, *(change.path.parent for change in self.changes)}:
            sweep(folder)

    def diff(self) -> str:
        """Return the changes as a unified diff, with paths relative to the checkout."""
        lines: list[str] = []
        for change in self.changed:
            old = "/dev/null" if change.before is None else f"a/{self.name(change)}"
            new = "/dev/null" if change.after is None else f"b/{self.name(change)}"
            lines += difflib.unified_diff(_lines(change.before), _lines(change.after), old, new)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def read_content(path: Path) -> bytes | None:
    """Return a file's content; None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AceError(f"{path} cannot be read, {error.strerror}; expected a file") from error


def _write(path: Path, content: bytes | None) -> None:
    if content is not None:
        publish(path, content, follow_link=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise AceError(f"{path} cannot be removed, {error.strerror}; make its folder writable") from error


def _lines(content: bytes | None) -> list[str]:
    # Split at \n only, as git does; str.splitlines splits at many more characters.
    lines = (content or b"").decode("utf-8", "backslashreplace").split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
