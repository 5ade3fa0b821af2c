"""Adds one import, the marked line, to a script, and removes it again without changing any other byte.

A script is patched if one of its lines is this import. The comment after the import is only for people who read the
script. Sources are parsed, never executed.
"""

from __future__ import annotations

import ast
import codecs
import re
import warnings
from collections.abc import Collection

from ..errors import AceError

LINE = "import ace_plugins.activate  # added by ace-patch; to undo, run 'ace-patch revert' or delete this line"
_MARKED = re.compile(rb"([ \t]*)import[ \t]+ace_plugins\.activate[ \t]*(#[^\r\n]*)?[\r\n]*")
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors that `parse` raises for a source that it cannot parse."""


def parse(source: bytes) -> ast.Module:
    """Parse a script. Raises one of ``UNREADABLE`` if it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about upstream's code do not concern the user
        return ast.parse(source)


def mark(source: bytes, name: str) -> bytes:
    """Return the source with ``LINE`` before its first statement; a marked source is returned unchanged."""
    try:
        source.decode("utf-8")
        tree = parse(source)
    except UNREADABLE as error:
        raise AceError(f"{name}: not valid Python in UTF-8 ({error}); correct it first, nothing was changed") from None
    if is_marked(source):
        return source
    bom, lines = _split(source)
    index, at = _find_place(tree, len(lines))
    newline = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    # A file without a newline at its end must have none after the change either.
    unfinished = at == len(lines) and bool(lines) and not lines[-1].endswith((b"\r", b"\n"))
    added = newline + LINE.encode() if unfinished else LINE.encode() + newline
    marked = bom + b"".join([*lines[:at], added, *lines[at:]])
    program = _dump(source)
    same = program is not None and _dump(marked, [at + 1]) == program
    if not same or parse(marked).body[index].lineno != at + 1:
        raise AceError(
            f"{name} line {at + 1}: a line added here would change the program; put the first statement after the "
            "docstring and future imports on its own line, nothing was changed"
        )
    return marked


def unmark(source: bytes, name: str = "the file") -> bytes:
    """Return the source without its marked lines and otherwise unchanged. The source may be invalid Python."""
    numbers = _find_marked(source)
    plain = _remove(source, numbers)
    program = _dump(source, numbers)
    if program is not None and program != _dump(plain):
        raise AceError(
            f"{name} line {numbers[0]}: cannot be unmarked: expected the marked line on its own, found code that "
            "needs it (it was moved into a body or joined to a line); remove it by hand, nothing was changed"
        )
    return plain


def is_marked(source: bytes) -> bool:
    """Return whether the source has a marked line."""
    return bool(_find_marked(source))


def _find_marked(source: bytes) -> list[int]:
    """Return the numbers of the marked lines, counted from 1. A line inside a string does not count."""
    found = {n: match for n, line in enumerate(_split(source)[1], 1) if (match := _MARKED.fullmatch(line))}
    try:
        nodes = ast.walk(parse(source)) if found else ()
    except UNREADABLE:
        return list(found)
    imports = {(node.lineno, node.col_offset) for node in nodes if isinstance(node, ast.Import)}
    return [n for n, match in found.items() if (n, len(match[1])) in imports]


def _find_place(tree: ast.Module, end: int) -> tuple[int, int]:
    """Return the indices of the statement and the line before which to insert: after docstring and future imports."""
    for index, node in enumerate(tree.body):
        docstring = index == 0 and ast.get_docstring(tree, clean=False) is not None
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__" and not node.level):
            first: ast.stmt | ast.expr = next(iter(getattr(node, "decorator_list", ())), node)
            return index, first.lineno - 1
    return len(tree.body), end


def _split(source: bytes) -> tuple[bytes, list[bytes]]:
    bom = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    return bom, source[len(bom) :].splitlines(keepends=True)


def _remove(source: bytes, numbers: Collection[int]) -> bytes:
    bom, lines = _split(source)
    kept = [line for number, line in enumerate(lines, 1) if number not in numbers]
    if kept and len(lines) in numbers and not lines[-1].endswith((b"\r", b"\n")):
        kept[-1] = kept[-1].removesuffix(b"\n").removesuffix(b"\r")
    return bom + b"".join(kept)


def _dump(source: bytes, without: Collection[int] = ()) -> str | None:
    """Return the syntax tree as text, except imports on the lines ``without``; None if the source does not parse."""

    class Remover(ast.NodeTransformer):
        def visit_Import(self, node: ast.Import) -> ast.Import | None:
            return None if node.lineno in without else node

    try:
        return ast.dump(Remover().visit(parse(source)))
    except UNREADABLE:
        return None
