"""The shape of source files: what a stub refuses, what it lets pass, and that nothing is ever executed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ace_plugins.checkout.shape import Bases, Parameter, Signature, differences, shape_of

NET = """
class Net(Module):
    def __init__(self, width, depth=...): ...
    def forward(self, x, mask=...): ...
def train(gpu, model): ...
"""

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, depth=3, *, dropout=0.0):
        super().__init__()
    def forward(self, x: torch.Tensor, mask=None) -> torch.Tensor:
        def inner(y): ...
        return x
    def extra(self): ...

def train(gpu, model, epochs=10, **options): ...
"""


def told(stub: str, source: bytes | str) -> list[str]:
    return list(differences(stub, source))


def test_a_source_that_has_it_all_and_more() -> None:
    assert told(NET, SOURCE) == []
    assert told(NET, SOURCE.encode()) == []
    assert told(NET, SOURCE.replace("\n", "\r\n").encode()) == []
    assert told("", SOURCE) == []


def test_every_difference_is_told_in_the_order_of_the_stub() -> None:
    source = SOURCE.replace("nn.Module", "object").replace("self, x:", "self, y:").replace("gpu, model", "model, gpu")
    assert told(NET, source) == [
        "class Net: expected bases (Module), found (object)",
        "Net.forward: expected (self, x, mask=...), found (self, y, mask=...)",
        "train: expected (gpu, model), found (model, gpu, epochs=..., **kwargs)",
    ]


def test_a_missing_class_says_it_all() -> None:
    stub = "class Net(Module):\n  class Inner:\n    def f(self): ...\n  def g(self): ...\nclass Network: ..."
    assert told(stub, "class Network: ...") == ["class Net(Module): expected, not found"]
    assert told(stub, "class Net(Module): ...\nclass Network: ...") == [
        "class Net.Inner(): expected, not found",
        "function Net.g(self): expected, not found",
    ]


def test_a_function_is_no_class_and_a_class_no_function() -> None:
    assert told("class Net: ...", "def Net(): ...") == ["class Net(): expected, not found"]
    assert told("def net(a): ...", "class net: ...") == ["function net(a): expected, not found"]
    assert told("def net(a): ...", "net = lambda a: a") == ["function net(a): expected, not found"]


@pytest.mark.parametrize(
    ("stub", "source"),
    [
        ("a, b", "a, b=1"),
        ("a, b=...", "a, b=1, c=2"),
        ("a", "a, *args"),
        ("a", "a, **kwargs"),
        ("a", "a, *, c=1"),
        ("a, /", "a, c=1, /"),
        ("*, k", "k"),
        ("*, k", "*, k=1"),
        ("*, k, j", "*, j, k"),
        ("*, k", "**kwargs"),
        ("*, k=...", "*, k=1, j=2"),
        ("a, *args", "a, *others"),
        ("a, **kwargs", "a, **others"),
        ("a, /", "a"),
        ("a, /, b", "a, /, b"),
    ],
)
def test_signatures_that_take_what_the_stub_takes(stub: str, source: str) -> None:
    assert told(f"def f({stub}): ...", f"def f({source}): ...") == []


@pytest.mark.parametrize(
    ("stub", "source", "expected", "found"),
    [
        ("a, b", "b, a", "(a, b)", "(b, a)"),
        ("a, b", "a, c", "(a, b)", "(a, c)"),
        ("a, b", "a", "(a, b)", "(a)"),
        ("a", "a, b", "(a)", "(a, b)"),
        ("a", "", "(a)", "()"),
        ("a, b", "a, c=1, b=2", "(a, b)", "(a, c=..., b=...)"),
        ("a=...", "a", "(a=...)", "(a)"),
        ("a, b", "a, *, b", "(a, b)", "(a, *, b)"),
        ("a, b", "*args, **kwargs", "(a, b)", "(*args, **kwargs)"),
        ("a", "a, *, b", "(a)", "(a, *, b)"),
        ("*, k", "*, j=1", "(*, k)", "(*, j=...)"),
        ("*, k=...", "*, k", "(*, k=...)", "(*, k)"),
        ("*, k=...", "k", "(*, k=...)", "(k)"),
        ("a, *args", "a", "(a, *args)", "(a)"),
        ("a, *args, k", "a, k=1, *args", "(a, *args, k)", "(a, k=..., *args)"),
        ("a, **kwargs", "a", "(a, **kwargs)", "(a)"),
        ("a", "a, /", "(a)", "(a, /)"),
        ("a, *, k", "a, k=1, /", "(a, *, k)", "(a, k=..., /)"),
        ("a, *, k", "a, k, /, **kwargs", "(a, *, k)", "(a, k, /, **kwargs)"),
    ],
)
def test_signatures_that_do_not(stub: str, source: str, expected: str, found: str) -> None:
    assert told(f"def f({stub}): ...", f"def f({source}): ...") == [f"f: expected {expected}, found {found}"]


def test_async_functions_decorators_and_annotations_do_not_matter() -> None:
    source = """
    @torch.jit.script
    async def train(gpu: int, model: "Net" = None) -> None: ...
    class Net(nn.Module):
        @staticmethod
        def f(a): ...
        @functools.wraps(print)
        def g(self, a): ...
    """
    stub = "def train(gpu, model=...): ...\nclass Net(Module):\n  def f(a): ...\n  def g(self, a): ..."
    assert told(stub, inspect.cleandoc(source)) == []


@pytest.mark.parametrize(
    "block",
    [
        "if version > 2:\n    {}\nelse:\n    pass",
        "if version > 2:\n    pass\nelif version > 1:\n    {}",
        "if version > 2:\n    pass\nelse:\n    {}",
        "try:\n    {}\nexcept ImportError:\n    raise",
        "try:\n    import a\nexcept ImportError:\n    {}",
        "try:\n    import a\nexcept ImportError:\n    pass\nelse:\n    {}",
        "try:\n    import a\nfinally:\n    {}",
        "with warnings.catch_warnings():\n    {}",
        "for _ in range(1):\n    {}",
        "while True:\n    {}\n    break",
        "match version:\n    case 1:\n        {}",
        "if a:\n    try:\n        with b:\n            {}\n    finally:\n        pass",
    ],
)
@pytest.mark.parametrize("declared", ["def f(a): ...", "class f(Base): ..."])
def test_what_is_declared_under_a_condition_is_declared(block: str, declared: str) -> None:
    assert told(declared, block.format(declared)) == []
    inside = block.format(declared).replace("\n", "\n    ")
    assert told(f"class C:\n    {declared}", f"class C:\n    {inside}") == []


def test_of_what_is_declared_twice_the_last_one_counts() -> None:
    source = "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str, c): ...\ndef f(a, b=1): ..."
    assert told("def f(a, b=...): ...", source) == []
    assert shape_of("class A:\n  def f(self): ...\nclass A(B):\n  def g(self): ...").keys() == {"A", "A.g"}
    assert shape_of("class A:\n  def f(self): ...\ndef A(): ...").keys() == {"A"}
    assert shape_of("class A: ...\nclass AB:\n  def f(self): ...\nclass A: ...").keys() == {"A", "AB", "AB.f"}
    either = "try:\n  def f(a): ...\nexcept E:\n  def f(b): ...\nelse:\n  def f(c): ..."
    assert told("def f(c): ...", either) == []


def test_a_property_is_its_getter() -> None:
    source = """
    class Net:
        @property
        def width(self): ...
        @width.setter
        def width(self, value): ...
        @width.deleter
        def width(self): ...
    """
    assert told("class Net:\n  def width(self): ...", inspect.cleandoc(source)) == []


@pytest.mark.parametrize(
    ("bases", "names"),
    [
        ("", ()),
        ("Module", ("Module",)),
        ("torch.nn.Module, metaclass=Meta", ("Module",)),
        ("Base[int]", ("Base",)),
        ("a.Base[b.C, d.E]", ("Base",)),
        ("Generic[T][int]", ("Generic",)),
        ("nn.Module, a.Mixin", ("Module", "Mixin")),
        ("make(nn.Module)", ("make(nn.Module)",)),
        ("make('a\\nb.c')", ("make('a\\nb.c')",)),
        ("*bases", ("*bases",)),
    ],
)
def test_bases_are_known_by_the_last_part_of_their_names(bases: str, names: tuple[str, ...]) -> None:
    assert shape_of(f"class Net({bases}): ...") == {"Net": Bases(names)}


def test_further_bases_and_their_order_do_not_matter() -> None:
    assert told("class Net(Module): ...", "class Net(Mixin, torch.nn.Module): ...") == []
    assert told("class Net(Module, Mixin): ...", "class Net(Mixin, Module): ...") == []
    assert told("class Net: ...", "class Net(Module): ...") == []
    assert told("class Net(Module, Mixin): ...", "class Net(Module): ...") == [
        "class Net: expected bases (Module, Mixin), found (Module)"
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (b"x = 1\ndef f(:\n", "not valid Python in line 2: "),
        (b"class A:\nx = 1\n", "not valid Python in line 2: expected an indented block"),
        (b"print 'hello'\n", "not valid Python in line 1: Missing parentheses"),
        (b"x = '\xff'\n", "not valid Python.*: .*utf-8"),
        (b"# -*- coding: no-such -*-\nx = 1\n", "not valid Python: unknown encoding: no-such"),
        (b"x = 1\0\n", "not valid Python.*: source code .* null bytes"),
        (b"x = " + b"(" * 5000, "not valid Python.*: "),
        (b"x = " + b"-" * 100_000 + b"1", "not valid Python.*: "),
        (b"class A(" + b"+".join([b"1"] * 20_000) + b"): ...", "not valid Python: nested too deeply"),
        (b"\xff\xfe\x00\x01", "not valid Python"),
    ],
)
def test_sources_that_are_not_python(source: bytes, problem: str) -> None:
    (found,) = told("def f(): ...", source)
    assert "\n" not in found
    assert re.match(problem, found), found


def test_encodings_that_python_knows() -> None:
    stub = "def f(a): ..."
    assert told(stub, "# -*- coding: latin-1 -*-\n# caf\xe9\ndef f(a): ...\n".encode("latin-1")) == []
    assert told(stub, b"\xef\xbb\xbfdef f(a): ...\n") == []
    assert told("def caf\xe9(a): ...", "# coding: latin-1\ndef caf\xe9(a): ...".encode("latin-1")) == []


def test_warnings_about_the_source_are_not_ours_to_tell() -> None:
    assert told("def f(a): ...", r"def f(a): return '\d' if a is 1 else assert_(0)") == []


def test_nothing_of_the_source_is_executed(tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    source = f"""
import no_such_module_anywhere
open({str(witness)!r}, "w").close()
def f(a=open({str(witness)!r}, "w")): ...
class Net(open({str(witness)!r}, "w")):
    open({str(witness)!r}, "w")
raise SystemExit("executed")
"""
    assert told("def f(a=...): ...\nclass Net: ...", source) == []
    assert not witness.exists()


def test_a_stub_may_be_indented_like_the_code_around_it() -> None:
    stub = """
        class Net(Module):
            def forward(self, x): ...
    """
    assert told(stub, "class Net(Module):\n  def forward(self, x): ...") == []


names = st.sampled_from(["a", "b", "c", "d", "e"])


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    order = draw(st.just("abcde") | st.permutations("abcde"))  # often the same, or few would fit
    count = draw(st.integers(0, 5))
    positional = draw(st.integers(0, count))
    optional = draw(st.integers(0, positional))
    slash = draw(st.integers(0, positional))
    words = [f"{name}=0" if i >= positional - optional else name for i, name in enumerate(order[:positional])]
    if slash:
        words.insert(slash, "/")
    if draw(st.booleans()):
        words.append("*args")
    elif count > positional:
        words.append("*")
    words.extend(f"{name}=0" if draw(st.booleans()) else name for name in order[positional:count])
    if draw(st.booleans()):
        words.append("**kwargs")
    return ", ".join(words)


def function(parameters: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def f({parameters}): pass", scope)
    return scope["f"]


calls = st.tuples(st.integers(0, 6), st.sets(st.sampled_from(["a", "b", "c", "d", "e", "other"])))


@settings(max_examples=150, deadline=None)
@given(parameter_lists(), parameter_lists(), st.lists(calls, max_size=12))
def test_what_fits_the_stub_fits_the_source(stub: str, source: str, calls: list[tuple[int, set[str]]]) -> None:
    if told(f"def f({stub}): ...", f"def f({source}): ..."):
        return
    wanted, have = function(stub), function(source)
    parameters = inspect.signature(wanted).parameters
    unnamed = {p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY}
    # What only **kwargs can take may have a name that the source has another use for.
    others = inspect.signature(have).parameters.keys() - parameters.keys()
    for count, chosen in calls:
        keywords = dict.fromkeys(chosen - unnamed - others, 0)
        try:
            wanted(*range(count), **keywords)
        except TypeError:
            continue
        have(*range(count), **keywords)


@settings(max_examples=40, deadline=None)
@given(parameter_lists())
@example("a, /, b=0, *args, c, d=0, **kwargs")
def test_a_signature_reads_as_python_does(parameters: str) -> None:
    (shape,) = shape_of(f"def f({parameters}): ...").values()
    again = f"def f{shape}: ...".replace("**kwargs", "**k").replace("*args", "*v")
    assert shape_of(again) == {"f": shape}
    assert isinstance(shape, Signature)
    kinds = inspect.signature(function(parameters)).parameters.values()
    plain = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert shape.positional == tuple(Parameter(p.name, p.default is not p.empty) for p in plain)


declarations = st.recursive(
    st.builds("{}def f{}({}): ...".format, st.sampled_from(["", "async "]), names, parameter_lists()),
    lambda inner: st.builds(
        lambda head, body: head + "\n" + "\n".join(f"    {line}" for part in body for line in part.splitlines()),
        st.sampled_from(["class A:", "class B(nn.Module):", "class A(Base[int], x.Y):", "if True:", "with open(0):"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(declarations, max_size=4).map("\n".join))
def test_a_source_has_its_own_shape(source: str) -> None:
    assert told(source, source) == []
    assert told(source, source.encode()) == []
    assert told("", source) == []
    first = told(source, "")
    assert first == told(source, "")
    assert all("\n" not in line and line.endswith("expected, not found") for line in first)
    assert bool(first) == bool(shape_of(source))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_source_is_too_odd(source: bytes) -> None:
    found = told(NET, source)
    assert found
    assert all(line and "\n" not in line for line in found)
