"""The marked line: where it goes, that it comes out byte for byte, and what is refused."""

from __future__ import annotations

import ast
import builtins
import codecs
import re
import types
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.errors import AceError
from ace_plugins.checkout.marking import LINE, activates, is_marked, mark, unmark

many = settings(max_examples=400, deadline=None, derandomize=True)
MARK = LINE.encode()
BOM = codecs.BOM_UTF8


def parses(source: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def events(source: bytes) -> list[object]:
    """What the source does, in order: the modules it imports and what it appends to ``ran``."""
    ran: list[object] = []

    def imported(name: str, *rest: Any) -> types.ModuleType:
        if name == "__future__":
            return __import__(name, *rest)
        ran.append(name)
        return types.ModuleType(name)

    names = {
        "__builtins__": {**vars(builtins), "__import__": imported},
        "__name__": "__main__",
        "ran": ran,
        "keep": lambda made: made,
    }
    exec(compile(source, "main.py", "exec", dont_inherit=True), names)
    return ran


EXAMPLES = {
    # source, marked
    "empty": (b"", MARK + b"\n"),
    "only a byte order mark": (BOM, BOM + MARK + b"\n"),
    "one statement": (b"import os\n", MARK + b"\nimport os\n"),
    "no newline at the end": (b"x", MARK + b"\nx"),
    "blank lines": (b"\n  \n", b"\n  \n" + MARK + b"\n"),
    "only a comment": (b"# x\n", b"# x\n" + MARK + b"\n"),
    "only a comment, unfinished": (b"# x", b"# x\n" + MARK),
    "only a docstring": (b'"""x"""\r\n', b'"""x"""\r\n' + MARK + b"\r\n"),
    "only a docstring, unfinished": (b'"""x"""', b'"""x"""\n' + MARK),
    "docstring and comment, unfinished": (b'"""x"""\r\n# c', b'"""x"""\r\n# c\r\n' + MARK),
    "unfinished blank line": (b"# x\n  ", b"# x\n  \n" + MARK),
    "only a future import": (
        b"from __future__ import annotations",
        b"from __future__ import annotations\n" + MARK,
    ),
    "shebang, cookie, comments": (
        b"#!/usr/bin/env python\n# -*- coding: latin-1 -*-\n# \xe9\n\nimport os\n",
        b"#!/usr/bin/env python\n# -*- coding: latin-1 -*-\n# \xe9\n\n" + MARK + b"\nimport os\n",
    ),
    "cookie after carriage returns": (
        b"#!/usr/bin/env python\r# coding: latin-1\rx = '\xe9'; import os\r",
        b"#!/usr/bin/env python\r# coding: latin-1\r" + MARK + b"\rx = '\xe9'; import os\r",
    ),
    "columns are counted in UTF-8": (
        b"# coding: latin-1\n'\xe9\xe9\xe9\xe9'; import os\nimport sys\n",
        b"# coding: latin-1\n'\xe9\xe9\xe9\xe9'; import os\n" + MARK + b"\nimport sys\n",
    ),
    "an encoding with ASCII in its second bytes": (
        b"# coding: shift_jis\n'\x83\x5c\x83\x5c'\nimport os\n",
        b"# coding: shift_jis\n'\x83\x5c\x83\x5c'\n" + MARK + b"\nimport os\n",
    ),
    "byte order mark": (BOM + b"import os\n", BOM + MARK + b"\nimport os\n"),
    "byte order mark and docstring": (BOM + b'"d"; x = 1\ny = 2', BOM + b'"d"; x = 1\n' + MARK + b"\ny = 2"),
    "docstring and futures": (
        b'"""two\nlines"""\n\nfrom __future__ import (\n    annotations,\n)  # c\nfrom __future__ import division\n\n'
        b"# os\nimport os\n",
        b'"""two\nlines"""\n\nfrom __future__ import (\n    annotations,\n)  # c\nfrom __future__ import division\n\n'
        b"# os\n" + MARK + b"\nimport os\n",
    ),
    "raw docstring over a continuation": (
        b"r'a\\\nb' \\\n'c'\nx = 1\n",
        b"r'a\\\nb' \\\n'c'\n" + MARK + b"\nx = 1\n",
    ),
    "docstring in brackets": (b"(\n'd'\n)\nx = 1\n", b"(\n'd'\n)\n" + MARK + b"\nx = 1\n"),
    "an f-string is no docstring": (b"f'{1}'\nx = 1\n", MARK + b"\nf'{1}'\nx = 1\n"),
    "bytes are no docstring": (b"b'd'\nx = 1\n", MARK + b"\nb'd'\nx = 1\n"),
    "a second string is a statement": (b"'d'\n'e'\n", b"'d'\n" + MARK + b"\n'e'\n"),
    "a relative import is no future import": (
        b"from .__future__ import x\n",
        MARK + b"\nfrom .__future__ import x\n",
    ),
    "decorator": (b"# c\n@keep\ndef f(): pass\n", b"# c\n" + MARK + b"\n@keep\ndef f(): pass\n"),
    "decorator in brackets": (
        b"'d'\n@(\n    keep\n)\nclass C: pass\n",
        b"'d'\n" + MARK + b"\n@(\n    keep\n)\nclass C: pass\n",
    ),
    "docstring and statement on one line": (
        b'"""doc"""; import os\nimport sys\n',
        b'"""doc"""; import os\n' + MARK + b"\nimport sys\n",
    ),
    "future and statements on one line": (
        b"from __future__ import annotations; import a; x = [\n1]; import b  # c\n\nimport c\n",
        b"from __future__ import annotations; import a; x = [\n1]; import b  # c\n\n" + MARK + b"\nimport c\n",
    ),
    "one line and no more": (b'"""doc"""; import os', b'"""doc"""; import os\n' + MARK),
    "semicolon at the end": (b'"""doc""";\nimport os\n', b'"""doc""";\n' + MARK + b"\nimport os\n"),
    "semicolon and comment": (b"'d';  # ; x\nimport os\n", b"'d';  # ; x\n" + MARK + b"\nimport os\n"),
    "statement on a continued line": (
        b'"""doc"""; \\\nimport os\nimport sys\n',
        b'"""doc"""; \\\nimport os\n' + MARK + b"\nimport sys\n",
    ),
    "statement on a continued line, windows": (
        b"'d'; \\\r\nimport os\r\nimport sys\r\n",
        b"'d'; \\\r\nimport os\r\n" + MARK + b"\r\nimport sys\r\n",
    ),
    "nothing on a continued line": (b"'d' \\\n\nx = 1\n", b"'d' \\\n\n" + MARK + b"\nx = 1\n"),
    "continuation before a statement": (b"# c\n\\\nimport os\n", b"# c\n" + MARK + b"\n\\\nimport os\n"),
    "comment that ends in a backslash": (b"# c \\\nimport os\n", b"# c \\\n" + MARK + b"\nimport os\n"),
    "form feed before a statement": (b"'d'\n\fimport os\n", b"'d'\n" + MARK + b"\n\fimport os\n"),
    "form feed among comments": (b"# a\n\f\n \f# b\nimport os\n", b"# a\n\f\n \f# b\n" + MARK + b"\nimport os\n"),
    "form feed in a docstring": (b"'''a\fb\x0bc'''\nx = 1\n", b"'''a\fb\x0bc'''\n" + MARK + b"\nx = 1\n"),
    "windows": (b"# c\r\nimport os\r\n", b"# c\r\n" + MARK + b"\r\nimport os\r\n"),
    "old mac": (b"# c\rimport os\r", b"# c\r" + MARK + b"\rimport os\r"),
    "mixed endings: of the next line": (b"# c\r\nimport os\rx = 1\n", b"# c\r\n" + MARK + b"\rimport os\rx = 1\n"),
    "mixed endings: of the line before": (b"# c\n# d\r\nimport os", b"# c\n# d\r\n" + MARK + b"\r\nimport os"),
    "mixed endings: the nearest": (b"# a\n# b\r\n# c", b"# a\n# b\r\n# c\r\n" + MARK),
    "the line in a string": (
        b'"""\n' + MARK + b'\n"""\nx = 1\n',
        b'"""\n' + MARK + b'\n"""\n' + MARK + b"\nx = 1\n",
    ),
    "the line in a comment": (b"# " + MARK + b"\nx = 1\n", b"# " + MARK + b"\n" + MARK + b"\nx = 1\n"),
    "an escape that warns": (b"x = '\\d'\n", MARK + b"\nx = '\\d'\n"),
    "an integer too long to print": (b"x = 0x" + b"f" * 9999, MARK + b"\nx = 0x" + b"f" * 9999),
    "a sum too long to dump": (b"x = 1" + b" + 1" * 900, MARK + b"\nx = 1" + b" + 1" * 900),
}


@pytest.mark.parametrize(("source", "marked"), EXAMPLES.values(), ids=EXAMPLES)
def test_where_the_line_goes(source: bytes, marked: bytes) -> None:
    assert mark(source, "main.py") == marked
    assert unmark(marked) == source
    assert mark(marked, "main.py") == marked
    assert is_marked(marked)
    assert not is_marked(source)


DOCSTRINGS = [
    "'d'",
    '"d"',
    "'''d'''",
    '"""d"""',
    "r'd\\w'",
    "u'd'",
    "R'''two\n\\w'''",
    "'a\\\nb'",
    "'a' \\\n  'b'",
    "('b')",
]
MULTILINE = ['"""two\nlines é"""', "'''\n\n# no comment\nimport os\n'''", f'"""\n{LINE}\n"""', "(\n'b'  # c\n)"]
FUTURES = [
    "annotations",
    "division as d",
    "(annotations)",
    "(\n    annotations,\n    division,  # c\n)",
    "division, \\\n  annotations",
]
SIMPLE = [
    "ran.append({n})",
    "ran.append(\n{n}\n)",
    "import os",
    "s = '#;'; ran.append({n})",
    "pass",
    "ran \\\n.append({n})",
]
COMPOUND = [
    "if True:\n    ran.append({n})",
    "def f(): pass",
    "@keep\ndef f():\n    'd'",
    "@(\n    keep\n)\nclass C:\n    ran.append({n})",
    "@ \\\nkeep\n# c\n@keep\nasync def f(): pass",
]
JOINS = ["; ", ";", " ;\\\n", "; \\\n  "]
BREAKS = [
    "\n",
    "\n\n",
    ";\n",
    "  # c\n",
    "; # é; x\n",
    " \\\n \n",
    "\n\n# c\n",
    "\n\f",
    "\n\\\n",
    "\n# c \\\n",
    f"\n# {LINE}\n",
]
LEADING = ["", "#!/usr/bin/env python\n", "# é\n", "\n", "  \n\f\n", "# c \\\n", f"# {LINE}\n", "\\\n"]
ENCODINGS = ["", "utf-8", "latin-1", "cp1252", "iso-8859-15"]


@dataclass(frozen=True)
class Source:
    text: bytes
    index: int  # of the import among the statements, once marked
    joined: bool  # whether the first statement shares a line with what must come before it


@st.composite
def sources(draw: st.DrawFn, strings: bool = True) -> Source:
    """Sources of all layouts; without strings, there are none that could swallow a neighbour of theirs."""
    bom = draw(st.booleans())
    encoding = draw(st.sampled_from(ENCODINGS[:2] if bom else ENCODINGS))
    lead = draw(st.sampled_from(LEADING))
    cookie = f"# -*- coding: {encoding} -*-\n" if encoding else ""

    docstrings = DOCSTRINGS + (MULTILINE if strings else [])
    preamble = draw(st.lists(st.sampled_from(docstrings), max_size=1))
    names = draw(st.lists(st.sampled_from(FUTURES), max_size=3))
    preamble += [f"from __future__ import {name}" for name in names]
    body = draw(st.lists(st.sampled_from(SIMPLE + COMPOUND), max_size=4))
    if strings:
        body += draw(st.lists(st.just(f"s = '''\n{LINE}\n'''"), max_size=1))

    if lead == "\\\n" and not preamble and not body:
        lead = ""  # a continuation of nothing does not parse
    text = lead + cookie if lead.startswith("#!") else cookie + lead

    index, chained = len(preamble), bool(preamble)
    statements = [*preamble, *body]
    for n, statement in enumerate(statements):
        text += statement.replace("{n}", str(n))
        following = statements[n + 1] if n + 1 < len(statements) else None
        if following is None:
            text += draw(st.sampled_from(["", "\n", "  ", " # c", "\n# c\n\n", ";", "\n \n"]))
        elif {statement, following}.isdisjoint(COMPOUND) and draw(st.integers(0, 3)) == 0:
            text += draw(st.sampled_from(JOINS))
            if chained and n + 1 >= len(preamble):
                index += len(ast.parse(following.replace("{n}", "0")).body)
            continue
        else:
            text += draw(st.sampled_from([b for b in BREAKS if statement not in COMPOUND or b[0] == "\n"]))
        if n + 1 >= len(preamble):
            chained = False
    joined = index > len(preamble)

    style = draw(st.sampled_from(["\n", "\r\n", "\r", None]))
    mixed = st.sampled_from(["\n", "\r\n", "\r"])
    text = re.sub("\n", lambda _: style or draw(mixed), text)
    return Source((BOM if bom else b"") + text.encode(encoding or "utf-8"), index, joined)


@many
@given(sources())
def test_it_goes_in_and_comes_out(source: Source) -> None:
    assert parses(source.text)
    marked = mark(source.text, "main.py")
    assert unmark(marked) == source.text
    assert mark(marked, "main.py") == marked
    assert is_marked(marked)
    assert not is_marked(source.text)
    assert activates(marked) == []
    assert marked.endswith((b"\r", b"\n")) == (source.text.endswith((b"\r", b"\n")) or source.text in (b"", BOM))


@many
@given(sources())
def test_it_comes_before_the_first_statement_that_can_have_it(source: Source) -> None:
    marked = mark(source.text, "main.py")
    body = ast.parse(marked).body
    assert ast.unparse(body.pop(source.index)) == "import ace_plugins.activate"
    assert [ast.dump(node) for node in body] == [ast.dump(node) for node in ast.parse(source.text).body]
    before, after = events(source.text), events(marked)
    assert after.count("ace_plugins.activate") == 1
    if not source.joined:
        assert after[0] == "ace_plugins.activate"
    after.remove("ace_plugins.activate")
    assert after == before


@many
@given(
    sources(strings=False),
    st.lists(
        st.tuples(st.sampled_from(["insert", "delete", "replace"]), st.integers(0), st.integers(0, 4)), max_size=4
    ),
)
def test_what_the_user_edited_stays(source: Source, edits: list[tuple[str, int, int]]) -> None:
    marked = mark(source.text, "main.py")
    bom = BOM if marked.startswith(BOM) else b""
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", marked.removeprefix(BOM))
    for how, where, what in edits:
        at = where % (len(lines) + 1)
        new = [b"x = 1\n", b"# c\r\n", b"    y = 2\n", b")\n", b"\r"][what]
        if how == "insert" and (at < len(lines) or lines[-1].endswith((b"\r", b"\n"))):
            lines.insert(at, new)
        elif how != "insert" and at < len(lines) and not lines[at].startswith(MARK):
            lines[at : at + 1] = [new] if how == "replace" else []
    (at,) = (n for n, line in enumerate(lines) if line.startswith(MARK))
    others = [*lines[:at], *lines[at + 1 :]]
    if at and at == len(lines) - 1 and not lines[at].endswith((b"\r", b"\n")):
        others[-1] = others[-1].rstrip(b"\r\n")
    edited, expected = bom + b"".join(lines), bom + b"".join(others)
    assert is_marked(edited)
    try:
        assert unmark(edited) == expected
    except AceError:  # a line above ends in a backslash and now reaches it
        assert parses(edited)
        assert not parses(expected)


SHARDS = [
    b'"""',
    b"'",
    b"\\",
    b"\\\n",
    b"\n",
    b"\r",
    b"\r\n",
    b"\f",
    b"  ",
    b"# c",
    b";",
    b"import os",
    b"x",
    b"(",
    b")",
]
SHARDS += [
    b"from __future__ import annotations",
    b"\xe9",
    "é".encode(),
    BOM,
    b"# coding: latin-1\n",
    b"@x\n",
    b"def f():",
]
SHARDS += [MARK, b"\n" + MARK + b"\n", b"import ace_plugins.activate", b"if x: ", b"pass", b"\0"]


@settings(many, max_examples=1500)
@given(st.lists(st.sampled_from(SHARDS), max_size=12).map(b"".join))
def test_nonsense_is_refused_or_goes_in_and_comes_out(source: bytes) -> None:
    try:
        changed = unmark(source) != source
    except AceError:
        changed = True
    assert is_marked(source) == changed
    try:
        marked = mark(source, "main.py")
    except AceError:
        assert not parses(source) or b"\xe9" in source
        return
    assert parses(marked)
    assert mark(marked, "main.py") == marked
    if changed or activates(source):
        assert marked == source
    else:
        assert unmark(marked) == source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            b"import os\n\ndef f(:\n    pass\n",
            "main.py line 3: not valid Python (invalid syntax): def f(:; mend it first, nothing was changed",
        ),
        (b"x = 1\n  y = 2\n", "main.py line 2: not valid Python (unexpected indent): y = 2; mend it first, "),
        (b"x = 1\0\n", "null bytes); mend it first, nothing was changed"),
        (b"x = '\xe9'\n", "not valid Python ("),
        (b"# coding: nonesuch\n", "main.py: not valid Python (unknown encoding: nonesuch); mend it first, "),
        (b"# coding: hex\n", "'hex' is not a text encoding"),
        (b"# coding: utf-16\nx = 1\n", "main.py: not valid Python ("),
        ("import os\n".encode("utf-16"), "main.py"),
        (BOM + b"# coding: latin-1\nx = 1\n", "main.py: not valid Python ("),
        (b"# coding: utf-7\nx = 1\n", "main.py: its encoding is utf-7: expected one in which ASCII is itself"),
        (b"# coding: unicode_escape\nx = 1\n", "main.py: its encoding is unicode_escape: expected one in which ASCII"),
        (b"(" * 5000, "main.py line 1: not valid Python (too many nested parentheses)"),
    ],
)
def test_what_cannot_be_marked(source: bytes, message: str) -> None:
    with pytest.raises(AceError) as caught:
        mark(source, "main.py")
    assert message in str(caught.value)
    assert str(caught.value).startswith("main.py")
    assert str(caught.value).endswith(" first, nothing was changed")
    assert "\n" not in str(caught.value)
    assert unmark(source) == source


def test_a_line_that_would_change_the_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for at in (1, 2):  # into a string, into brackets
        monkeypatch.setattr("ace_plugins.checkout.marking._place", lambda tree, lines, at=at: at)
        with pytest.raises(AceError, match=rf"main.py line {at + 1}: cannot be marked: .* nothing was changed"):
            mark(b"x = ('''\n''',\n 1)\n", "main.py")


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        (b"x = 1\n" + MARK + b"\ny = 2\n", b"x = 1\ny = 2\n"),
        (b"x = 1\r\n" + MARK, b"x = 1"),
        (b"x = 1\r" + MARK, b"x = 1"),
        (b"x = 1\n\n" + MARK, b"x = 1\n"),
        (MARK, b""),
        (BOM + MARK, BOM),
        (MARK + b"\n" + MARK + b"\r\n" + b"x = 1\n" + MARK, b"x = 1"),
        (b"import ace_plugins.activate # added by ace-patch 9: see 'ace-patch help'\nx = 1\n", b"x = 1\n"),
        (b"import  ace_plugins.activate#keep: added by ace-patch  \t\nx = 1\n", b"x = 1\n"),
        (b"if x:\n    " + MARK + b"\n    y = 1\n", b"if x:\n    y = 1\n"),
        (b"def f():\n\t" + MARK + b"\n\tpass\n", b"def f():\n\tpass\n"),
        (b"x = '''\n" + MARK + b"\n'''\n" + MARK + b"\n", b"x = '''\n" + MARK + b"\n'''\n"),
        # the string ends in what looks like the comment, and a true import follows
        (b"x = '''\n" + MARK + b"'''; import ace_plugins.activate\n", None),
        (b"import ace_plugins.activate  # mine\n", None),
        (b"import ace_plugins.activate, os  # added by ace-patch\n", None),
        (b"x = 1; import ace_plugins.activate  # added by ace-patch\n", None),
        (b"# " + MARK + b"\n", None),
        # these do not parse: only what the lines look like counts
        (b"def f(:\n" + MARK + b"\n", b"def f(:\n"),
        (b"x = (\n  " + MARK + b"\r\n", b"x = (\n"),
        (b"if x:\n" + MARK + b"\n    y = 1\n", b"if x:\n    y = 1\n"),
        (b"\0\r" + MARK + b"\r\xff", b"\0\r\xff"),
    ],
)
def test_what_is_removed(source: bytes, plain: bytes | None) -> None:
    assert unmark(source) == (source if plain is None else plain)
    assert is_marked(source) == (plain is not None)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"if x:\n    " + MARK + b"\ny = 1\n", 2),
        (b"if x:\n    " + MARK + b"\n    " + MARK + b"\ny = 1\n", 2),
        (b"try:\n    pass\nfinally:\n    " + MARK, 4),
        # it would parse, and do something else
        (b"if x: \\\n" + MARK + b"\ny = 1\n", 2),
        (b"x = 1; \\\n" + MARK, 2),
    ],
)
def test_a_line_that_is_needed_is_not_removed(source: bytes, line: int) -> None:
    assert parses(source)
    with pytest.raises(AceError, match=f"^main.py line {line}: cannot be unmarked: .* nothing was changed$"):
        unmark(source, "main.py")
    with pytest.raises(AceError, match=f"^the file line {line}: "):
        unmark(source)
    assert is_marked(source)
    assert mark(source, "main.py") == source


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (b"x = 1\nimport ace_plugins.activate\n", [2]),
        (b"import ace_plugins.activate  # added by me\n", [1]),
        (b"import os, ace_plugins.activate as a\n", [1]),
        (b"from ace_plugins import activate\nfrom ace_plugins.activate import on\n", [1, 2]),
        (b"if x:\n    import ace_plugins.activate\n", [2]),
        (b"try:\n    import ace_plugins.activate\nexcept ImportError:\n    pass\n", [2]),
        (b"x = 1; import ace_plugins.activate\n" + MARK + b"\n", [1]),
    ],
)
def test_the_users_own_imports(source: bytes, lines: list[int]) -> None:
    assert activates(source) == lines
    assert mark(source, "main.py") == source


@pytest.mark.parametrize(
    "source",
    [
        b"import ace_plugins\n",
        b"from ace_plugins import attach\n",
        b"from . import activate\n",
        b"from .ace_plugins import activate\n",
        b"import ace_plugins.activated\n",
        b"'import ace_plugins.activate'\n",
        b"def f():\n    import ace_plugins.activate\n",
        b"async def f():\n    if x:\n        import ace_plugins.activate\n",
    ],
)
def test_imports_that_activate_nothing(source: bytes) -> None:
    assert activates(source) == []
    assert is_marked(mark(source, "main.py"))


def test_no_lines_of_a_broken_file() -> None:
    assert activates(b"import ace_plugins.activate\n)\n") == []
