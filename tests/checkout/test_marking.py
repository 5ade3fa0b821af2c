"""The marked line: where it goes, that it comes out byte for byte, and what is refused."""

from __future__ import annotations

import ast
import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.checkout.marking import LINE, is_marked, mark, unmark
from ace_plugins.errors import AceError

MARK = LINE.encode()
BOM = codecs.BOM_UTF8


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"", b"import os\n"),
        (b"#!/usr/bin/env python\n# c\n\n", b"import os\n"),
        (b'"""two\nlines"""\n', b"import os\n"),
        (
            b"'d'\nfrom __future__ import (\n    annotations,\n)  # c\nfrom __future__ import division\n# os\n",
            b"import os",
        ),
        (b"# c\r\n", b"import os\r\n"),
        (BOM, b"import os\n"),
        (b"'d'\n", b"'no docstring'\n"),
        (b"", b"f'{1}'\n"),
        (b"", b"x = '\\d'  # an escape that warns\n"),
        (b"", b"from .__future__ import x\n"),
        (b"# c\n", b"@keep\n@twice\ndef f(): pass\n"),
        (b"# " + MARK + b"\n", b"import os\n"),
        (b"'d';\n", b"import a; import b\n"),
    ],
)
def test_it_goes_before_the_first_statement(before: bytes, after: bytes) -> None:
    newline = b"\r\n" if b"\r\n" in before else b"\n"
    marked = before + MARK + newline + after
    assert mark(before + after, "main.py") == marked
    assert mark(marked, "main.py") == marked
    assert is_marked(marked)
    assert not is_marked(before + after)
    assert unmark(marked) == before + after


@pytest.mark.parametrize("source", [b"# x", b'"""x"""\r\n# c', b"from __future__ import annotations"])
def test_a_missing_newline_stays_missing(source: bytes) -> None:
    marked = mark(source, "main.py")
    assert marked == source + (b"\r\n" if b"\r\n" in source else b"\n") + MARK
    assert unmark(marked) == source


STARTS = ["", "#!/usr/bin/env python\n", "# é\n\n", "# -*- coding: utf-8 -*-\n"]
DOCSTRINGS = ["", '"""two\nlines é"""', "r'd\\w'", "(\n'd'  # c\n)", "'d';"]
FUTURES = ["annotations", "(\n    annotations,\n    division,  # c\n)", "division, \\\n  annotations"]
STATEMENTS = [
    "import os", "x = '#;'; y = 1", "if x:\n    pass", "@keep\ndef f():\n    'd'", "class C: pass",
    "x = [\n  1,\n]",
]  # fmt: skip
BREAKS = ["\n", "\n\n", "  # c\n", "\n\n# é\n", "\n\f", f"\n# {LINE}\n"]


@st.composite
def sources(draw: st.DrawFn) -> bytes:
    parts = [draw(st.sampled_from(DOCSTRINGS))]
    parts += [f"from __future__ import {name}" for name in draw(st.lists(st.sampled_from(FUTURES), max_size=2))]
    parts += draw(st.lists(st.sampled_from(STATEMENTS), max_size=4))
    text = draw(st.sampled_from(STARTS)) + "".join(part + draw(st.sampled_from(BREAKS)) for part in parts if part)
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n"])))
    text = text.rstrip() if draw(st.booleans()) else text
    return draw(st.sampled_from([b"", BOM])) + text.encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sources())
def test_it_goes_in_and_comes_out(source: bytes) -> None:
    marked = mark(source, "main.py")
    assert unmark(marked) == source
    assert marked.endswith(b"\n") == (source.endswith(b"\n") or source in (b"", BOM))
    plain, body = ast.parse(source).body, ast.parse(marked).body
    (at,) = (i for i, node in enumerate(body) if ast.unparse(node) == "import ace_plugins.activate")
    assert [*map(ast.dump, body[:at] + body[at + 1 :])] == [*map(ast.dump, plain)], "the same program"
    imported = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in plain]
    docstring = ast.get_docstring(ast.parse(source)) is not None
    assert at == sum(imported) + docstring, "nothing else comes before it"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([
    b'"""', b"'", b"\\", b"\n", b"\r", b"\r\n", b"\f", b"  ", b"# c", b";", b"x", b"(", b")", b"\xe9", BOM, b"\0", MARK,
    b"from __future__ import annotations", b"\n" + MARK + b"\n", b"import ace_plugins.activate", b"@x\n", b"if x: ",
]), max_size=10).map(b"".join))  # fmt: skip
def test_nonsense_is_refused_or_goes_in_and_comes_out(source: bytes) -> None:
    try:
        marked = mark(source, "main.py")
    except AceError as error:
        marked, told = None, str(error)
    if marked is None:
        assert told.startswith("main.py")
        assert "\n" not in told
    elif is_marked(source):
        assert marked == source
    else:
        assert unmark(marked) == source
        assert is_marked(marked)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"import os\ndef f(:\n", "main.py: not valid Python in UTF-8 (invalid syntax (line 2))"),
        (b"# coding: latin-1\nx = '\xe9'\n", "main.py: not valid Python in UTF-8 ('utf-8' codec can't decode byte"),
        (b"x = 1\0\n", "null bytes"),
        (b"'d'; import os\n", "main.py line 1: a line added here would change the program"),
        (b"from __future__ import annotations; import os\n", "main.py line 1: a line added here"),
        (b"'d'\n@(\n    keep\n)\nclass C: pass\n", "main.py line 3: a line added here"),
    ],
)
def test_what_is_refused(source: bytes, message: str) -> None:
    with pytest.raises(AceError) as caught:
        mark(source, "main.py")
    assert message in str(caught.value)
    assert "nothing was changed" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        (b"x = 1\n" + MARK + b"\ny = 2\n", b"x = 1\ny = 2\n"),
        (MARK + b"\n" + MARK + b"\r\nx = 1\n" + MARK, b"x = 1"),
        (b"import ace_plugins.activate # in other words\nx = 1\nimport ace_plugins.activate", b"x = 1"),
        (b"if x:\n    " + MARK + b"\n    y = 1\n", b"if x:\n    y = 1\n"),
        (b"# \xe9\n" + MARK + b"\nx = '\xe9'\n", b"# \xe9\nx = '\xe9'\n"),
        (b"def f(:\n" + MARK + b"\n", b"def f(:\n"),
    ],
)
def test_what_was_edited_around_it_stays(source: bytes, plain: bytes) -> None:
    assert is_marked(source)
    assert unmark(source) == plain


@pytest.mark.parametrize("source", [b"x = 1; import ace_plugins.activate\n", b"# " + MARK])
def test_what_is_not_the_mark_stays(source: bytes) -> None:
    assert not is_marked(source)
    assert unmark(source) == source


def test_many_marked_lines_are_taken_out_at_once() -> None:
    source = b"import os\n" + (LINE.encode() + b"\n") * 20_000
    assert unmark(source) == b"import os\n"
