"""Change several files, all of them or none, and show the changes beforehand.

One marked line in somebody else's script, put in and taken out again byte for byte.

The line is the only record that it was put there. What counts is the import on a line of its own; the comment is for
people. Sources are parsed, never executed.
"""

from __future__ import annotations

import ast
import codecs
import difflib
import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import AceError
from ..output import publish


@dataclass(frozen=True)
class Change:
    """What a file holds and what it is to hold. Of a link, the file it points to changes."""

    path: Path
    before: bytes | None
    """None: it must not exist."""
    after: bytes | None
    """None: it is removed."""


def apply(changes: Sequence[Change]) -> None:
    """Make the changes. If one fails, or on an interrupt, every file gets its old content back."""
    try:
        for change in changes:
            _check(change)
    except AceError as error:
        raise AceError(f"{error}; nothing was changed") from error
    begun: list[Change] = []
    try:
        for change in changes:
            if change.before != change.after:
                begun.append(change)  # before it happens: an interrupt may come right after
                _put(change.path, change.after)
    except BaseException as error:
        changed = [str(change.path) for change in reversed(begun) if not _restored(change)]
        outcome = f"{', '.join(changed)} could not be put back" if changed else "nothing was changed"
        if isinstance(error, AceError) or changed:
            raise AceError(f"{str(error) or type(error).__name__}; {outcome}") from error
        raise


def diff(changes: Sequence[Change], root: Path) -> str:
    """The changes as a unified diff, with paths from ``root``."""
    return "".join(line for change in changes for line in _diff(change, root))


def _check(change: Change) -> None:
    """Whether the file is as it was read and can be written. That nobody may write it holds for the superuser too."""
    path = change.path
    if content_of(path) != change.before:
        raise AceError(f"{path} has changed since it was read; run the command again")
    if change.before == change.after:
        return
    target = Path(os.path.realpath(path))
    places = {target.parent: f"its folder {target.parent}"} | ({} if change.before is None else {target: "it"})
    for place, what in places.items():
        if not (place.stat().st_mode & 0o222 and os.access(place, os.W_OK)):
            raise AceError(f"{path} cannot be changed, {what} is read-only; make it writable or work on a copy")


def content_of(path: Path) -> bytes | None:
    """What a file holds; None if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AceError(f"{path} cannot be read, {error.strerror}; expected a file") from error


def _put(path: Path, content: bytes | None) -> None:
    if content is not None:
        publish(path, content)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise AceError(f"{path} cannot be removed, {error.strerror}; make its folder writable") from error


def _restored(change: Change) -> bool:
    try:
        if content_of(change.path) != change.before:
            _put(change.path, change.before)
    except AceError:
        return False
    return True


def _diff(change: Change, root: Path) -> Iterator[str]:
    name = Path(os.path.relpath(change.path, root)).as_posix()
    old = "/dev/null" if change.before is None else f"a/{name}"
    new = "/dev/null" if change.after is None else f"b/{name}"
    for line in difflib.unified_diff(_lines(change.before), _lines(change.after), old, new):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(content: bytes | None) -> list[str]:
    # At \n alone, as git does; splitlines knows many more.
    lines = (content or b"").decode("utf-8", "backslashreplace").split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


LINE = "import ace_plugins.activate  # added by ace-patch; to undo, run 'ace-patch revert' or delete this line"
_MARKED = re.compile(rb"([ \t]*)import[ \t]+ace_plugins\.activate[ \t]*(#[^\r\n]*)?[\r\n]*")
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
LARGEST = 4_000_000
"""Bytes of a script at most. Python needs minutes to parse larger ones, and nobody wrote them by hand."""


def mark(source: bytes, name: str) -> bytes:
    """The source with ``LINE`` before its first statement; as it is, if it is marked already."""
    try:
        source.decode("utf-8")
        tree = parse(source)
    except UNREADABLE as error:
        raise AceError(f"{name}: not valid Python in UTF-8 ({error}); mend it first, nothing was changed") from None
    if is_marked(source):
        return source
    bom, lines = _split(source)
    index, at = _place(tree, len(lines))
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    # A file without a newline at its end has none afterwards.
    unfinished = at == len(lines) and bool(lines) and not lines[-1].endswith((b"\r", b"\n"))
    added = newline + LINE.encode() if unfinished else LINE.encode() + newline
    marked = bom + b"".join([*lines[:at], added, *lines[at:]])
    program = _program(source)
    same = program is not None and _program(marked, [at + 1]) == program
    if not same or parse(marked).body[index].lineno != at + 1:
        raise AceError(
            f"{name} line {at + 1}: no line can be put here without changing the program; put the first statement "
            "after docstring and future imports on a line of its own, nothing was changed"
        )
    return marked


def unmark(source: bytes, name: str = "the file") -> bytes:
    """The source without its marked lines; nothing else changes, even if it does not parse any more."""
    numbers = _marked(source)
    plain = _without(source, numbers)
    program = _program(source, numbers)
    if program is not None and program != _program(plain):
        raise AceError(
            f"{name} line {numbers[0]}: cannot be unmarked: expected the marked line on its own, found code that "
            "needs it (it was moved into a body or joined to a line); remove it by hand, nothing was changed"
        )
    return plain


def is_marked(source: bytes) -> bool:
    """Whether ``unmark`` has anything to remove."""
    return bool(_marked(source))


def _marked(source: bytes) -> list[int]:
    """Line numbers, from 1. A line in a string looks the same, but no statement begins there."""
    found = {n: match for n, line in enumerate(_split(source)[1], 1) if (match := _MARKED.fullmatch(line))}
    try:
        nodes = ast.walk(parse(source)) if found else ()
    except UNREADABLE:
        return list(found)
    imports = {(node.lineno, node.col_offset) for node in nodes if isinstance(node, ast.Import)}
    return [n for n, match in found.items() if (n, len(match[1])) in imports]


def _place(tree: ast.Module, end: int) -> tuple[int, int]:
    """Where to insert, as an index of statements and of lines: after the docstring and future imports."""
    for index, node in enumerate(tree.body):
        docstring = index == 0 and ast.get_docstring(tree, clean=False) is not None
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__" and not node.level):
            first: ast.stmt | ast.expr = next(iter(getattr(node, "decorator_list", ())), node)
            return index, first.lineno - 1
    return len(tree.body), end


def _split(source: bytes) -> tuple[bytes, list[bytes]]:
    bom = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    return bom, source[len(bom) :].splitlines(keepends=True)


def _without(source: bytes, numbers: Collection[int]) -> bytes:
    bom, lines = _split(source)
    gone = set(numbers)
    kept = [line for number, line in enumerate(lines, 1) if number not in gone]
    if kept and len(lines) in numbers and not lines[-1].endswith((b"\r", b"\n")):
        kept[-1] = kept[-1].removesuffix(b"\n").removesuffix(b"\r")
    return bom + b"".join(kept)


def _program(source: bytes, without: Collection[int] = ()) -> str | None:
    """What the source means, without the imports on these lines; None if it does not parse."""

    gone = set(without)

    class Remove(ast.NodeTransformer):
        def visit_Import(self, node: ast.Import) -> ast.Import | None:
            return None if node.lineno in gone else node

    try:
        return ast.dump(Remove().visit(parse(source)))
    except UNREADABLE:
        return None


def parse(source: bytes) -> ast.Module:
    """Raises one of ``UNREADABLE`` for what is not Python, or too much of it."""
    if len(source) > LARGEST:
        raise ValueError(f"{len(source):,} bytes, expected a script of at most {LARGEST:,}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about their escapes and comparisons: not ours to tell
        return ast.parse(source)
