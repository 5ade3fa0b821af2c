"""One marked line in somebody else's script, put in and taken out again byte for byte.

The line is the only record that it was put there. Sources are parsed, never executed.
"""

from __future__ import annotations

import ast
import codecs
import re
import string
import tokenize
import warnings
from collections.abc import Iterator

from ..errors import AceError

LINE = "import ace_plugins.activate  # added by ace-patch; to undo, run 'ace-patch revert' or delete this line"

_PACKAGE, _MODULE = "ace_plugins", "activate"
# As the parser counts lines: a form feed does not end one, a lone carriage return does.
_EOL = rb"(?:\r\n|\r(?!\n)|\n)"
_LINES = re.compile(rb"[^\r\n]*" + _EOL + rb"|[^\r\n]+")
# The rest of the comment may be worded otherwise by other versions.
_MARKED = re.compile(
    rb"(?P<indent>[ \t\f]*)import[ \t]+ace_plugins\.activate[ \t]*#[^\r\n]*added by ace-patch[^\r\n]*[\r\n]*"
)
# What follows a statement, where no other statement shares its logical line.
_REST = re.compile(rb"(?:[ \t\f;]|\\" + _EOL + rb")*(?:#[^\r\n]*)?(?:" + _EOL + rb"|\Z)")
_BLANK = re.compile(rb"(?:[ \t\f]*(?:#[^\r\n]*)?(?:" + _EOL + rb"|\Z))*")
_UNREADABLE = (SyntaxError, ValueError, LookupError, RecursionError, MemoryError)


def mark(source: bytes, name: str) -> bytes:
    """The source with ``LINE`` before the first statement that can have it; as it is, if that is active already."""
    try:
        tree = _parse(source)
    except _UNREADABLE as error:
        raise AceError(f"{_complaint(name, error)}; mend it first, nothing was changed") from None
    if is_marked(source) or activates(source):
        return source
    bom, lines = _split(source)
    at = _place(tree, _utf8(source, len(lines), name))
    added = LINE.encode("ascii")
    # A file without a newline at its end has none afterwards.
    unfinished = at == len(lines) and bool(lines) and not _ending(lines[-1])
    added = _newline(lines, at) + added if unfinished else added + _newline(lines, at)
    marked = bom + b"".join([*lines[:at], added, *lines[at:]])
    if not (_marked(marked) == [at + 1] and _adds(marked, at + 1, source) and _without(marked, at + 1) == source):
        raise AceError(
            f"{name} line {at + 1}: cannot be marked: expected the same program with one import more, found another; "
            f"write 'import {_PACKAGE}.{_MODULE}' into it by hand, nothing was changed"
        )
    return marked


def unmark(source: bytes, name: str = "the file") -> bytes:
    """The source without its marked lines; nothing else changes, also if it does not parse any more."""
    parses = _parses(source)
    for number in reversed(_marked(source)):  # from the last on, so that the numbers stay true
        plain = _without(source, number)
        if parses and not _adds(source, number, plain):
            raise AceError(
                f"{name} line {number}: cannot be unmarked: expected the marked line on its own, found code that "
                "needs it (it was moved into a body or joined to a line); remove it by hand, nothing was changed"
            )
        source = plain
    return source


def is_marked(source: bytes) -> bool:
    """Whether ``unmark`` has anything to remove."""
    return bool(_marked(source))


def activates(source: bytes) -> list[int]:
    """The lines that import the activation without the mark: the user's own, or reworded ones.

    Not in functions, which may never be called; of a source that does not parse, none.
    """
    try:
        tree = _parse(source)
    except _UNREADABLE:
        return []
    return sorted({node.lineno for node in _executed(tree) if _imports_it(node)}.difference(_marked(source)))


def _marked(source: bytes) -> list[int]:
    _, lines = _split(source)
    found = {n: match for n, line in enumerate(lines, 1) if (match := _MARKED.fullmatch(line))}
    if not found:
        return []
    try:
        tree = _parse(source)
    except _UNREADABLE:
        return list(found)
    # A line in a string looks the same, but no statement begins there.
    imports = {(node.lineno, node.col_offset) for node in ast.walk(tree) if isinstance(node, ast.Import)}
    return [n for n, match in found.items() if (n, len(match["indent"])) in imports]


def _place(tree: ast.Module, lines: list[bytes]) -> int:
    """The index of the line to insert before. The lines are UTF-8, in which the tree counts its columns."""
    text = b"".join(lines)
    after = 0
    for index, node in enumerate(tree.body):
        if _is_future(node) or (index == 0 and _is_docstring(node)):
            after = index + 1
    offset = len(text) if after else 0
    for node in tree.body[after - 1 :] if after else []:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        if rest := _REST.match(text, end):  # else another statement shares the line
            offset = rest.end()
            break
    if blank := _BLANK.match(text, offset):
        offset = blank.end()
    return len(_LINES.findall(text[:offset]))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__" and not node.level


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo.extend(ast.iter_child_nodes(node))


def _imports_it(node: ast.stmt) -> bool:
    whole = f"{_PACKAGE}.{_MODULE}"
    if isinstance(node, ast.Import):
        return any(alias.name == whole for alias in node.names)
    if isinstance(node, ast.ImportFrom) and not node.level:
        return node.module == whole or (node.module == _PACKAGE and any(alias.name == _MODULE for alias in node.names))
    return False


def _utf8(source: bytes, count: int, name: str) -> list[bytes]:
    """The lines in UTF-8, without a byte order mark; refused where ASCII is not itself."""
    try:
        encoding, _ = tokenize.detect_encoding(iter(_LINES.findall(source)).__next__)
        lines: list[bytes] = _LINES.findall(source.decode(encoding).encode("utf-8"))
    except _UNREADABLE as error:  # from bytes, the parser does not look into comments; of a file it does
        raise AceError(f"{_complaint(name, error)}; mend it first, nothing was changed") from None
    if len(lines) != count or not _is_ascii(encoding):
        raise AceError(
            f"{name}: its encoding is {encoding}: expected one in which ASCII is itself, such as UTF-8; "
            "save it as UTF-8 first, nothing was changed"
        )
    return lines


def _is_ascii(encoding: str) -> bool:
    try:
        return all(char.encode("ascii").decode(encoding) == char for char in string.printable)
    except ValueError:
        return False


def _split(source: bytes) -> tuple[bytes, list[bytes]]:
    bom = codecs.BOM_UTF8 if source.startswith(codecs.BOM_UTF8) else b""
    return bom, _LINES.findall(source[len(bom) :])


def _ending(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


def _newline(lines: list[bytes], at: int) -> bytes:
    """As the line that comes next has it, or else the nearest before."""
    return next(filter(None, map(_ending, (*lines[at : at + 1], *reversed(lines[:at])))), b"\n")


def _without(source: bytes, number: int) -> bytes:
    bom, lines = _split(source)
    removed = lines.pop(number - 1)
    if lines and not _ending(removed):
        lines[-1] = lines[-1].rstrip(b"\r\n")
    return bom + b"".join(lines)


def _adds(marked: bytes, number: int, plain: bytes) -> bool:
    """Whether the two are one program, but for the import on that line."""
    try:
        tree, expected = _parse(marked), _parse(plain)
    except _UNREADABLE:
        return False
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [one for one in value if not (isinstance(one, ast.Import) and one.lineno == number)]
    return _same(tree, expected)


def _same(one: object, other: object) -> bool:
    # ast.dump would compare them too, but fails on long sums and on very large integers
    todo = [(one, other)]
    while todo:
        one, other = todo.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, ast.AST):
            todo.extend((getattr(one, field, None), getattr(other, field, None)) for field in one._fields)
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            todo.extend(zip(one, other, strict=True))
        elif one != other:
            return False
    return True


def _parses(source: bytes) -> bool:
    try:
        _parse(source)
    except _UNREADABLE:
        return False
    return True


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their escapes and comparisons: not ours to tell
        return ast.parse(source)


def _complaint(name: str, error: BaseException) -> str:
    """``main.py line 12: not valid Python (invalid syntax): def f(``"""
    number, text = getattr(error, "lineno", None), getattr(error, "text", None)
    where = f"{name} line {number}" if number else name
    reason = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
    found = f": {' '.join(text.split())[:80]}" if text and text.strip() else ""
    return f"{where}: not valid Python ({' '.join(reason.split())}){found}"
