"""Adds one import, the marked line, to a script, and removes it again without changing any other byte.

A script is patched if one of its lines is this import. The comment after the import is only for people who read the
script. Sources are parsed, never executed.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import re
import warnings

from ..errors import AceError

LINE = "import ace_plugins.activate  # added by ace-patch; to undo, run 'ace-patch revert' or delete this line"
_MARKED = re.compile(rb"[ \t]*import[ \t]+ace_plugins\.activate[ \t]*(#[^\r\n]*)?[\r\n]*")


def parse(source: bytes) -> ast.Module:
    """Parse a script; raise a ValueError if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about upstream's code do not concern the user
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(str(error).replace("<unknown>, ", "") or "nested too deeply") from None


def mark(source: bytes, name: str) -> bytes:
    """Return the source with ``LINE`` before its first statement; a marked source is returned unchanged."""
    try:
        source.decode("utf-8")
        tree = parse(source)
    except ValueError as error:
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
    with contextlib.suppress(ValueError, IndexError):
        after = parse(marked)
        del after.body[index]
        if ast.dump(after) == ast.dump(tree):
            return marked
    raise AceError(
        f"{name} line {at + 1}: a line added here would change the program; put the first statement after the "
        "docstring and future imports on its own line, nothing was changed"
    )


def unmark(source: bytes) -> bytes:
    """Return the source without its marked lines and otherwise unchanged. The source may be invalid Python."""
    bom, lines = _split(source)
    kept = [line for line in lines if not _MARKED.fullmatch(line)]
    if kept and _MARKED.fullmatch(lines[-1]) and not lines[-1].endswith((b"\r", b"\n")):
        kept[-1] = kept[-1].removesuffix(b"\n").removesuffix(b"\r")
    return bom + b"".join(kept)


def is_marked(source: bytes) -> bool:
    return any(map(_MARKED.fullmatch, _split(source)[1]))


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
