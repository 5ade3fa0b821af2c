"""What a folder is: whether it has what an adapter's stubs name, and at which commit it is."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from clones import git
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.adapter import Checkout
from ace_plugins.checkout.layout import Layout, find_differences, fits, read_commit, read_layout

STUB = """
class Net(Module):
    def __init__(self, width, depth=...): ...
    def forward(self, x, mask=...): ...
def train(gpu, model): ...
"""
SOURCE = """
from torch import nn
class Net(Mixin, nn.Module):
    def __init__(self, width: int, depth=3, *, dropout=0.0):
        super().__init__()
    @torch.no_grad()
    def forward(self, x, mask=None) -> "Tensor":
        def inner(y): ...
    def extra(self): ...
async def train(gpu, model, epochs=10, **options): ...
"""


def told(stub: str, source: str) -> list[str]:
    return list(find_differences(stub, source.encode()))


def test_a_source_may_hold_more_than_its_stub() -> None:
    assert told(STUB, SOURCE) == []
    assert told(STUB, SOURCE.replace("\n", "\r\n")) == []
    assert told(STUB.replace("\n", "\n    "), SOURCE) == [], "a stub may be indented like the code around it"


def test_every_difference_is_reported_in_the_order_of_the_stub() -> None:
    source = SOURCE.replace("nn.Module", "Base[int]").replace("self, x,", "self, y,").replace("gpu, model", "model")
    assert told(STUB, source) == [
        "class Net: expected (Module), found (Mixin, Base)",
        "function Net.forward: expected (self, x, mask=...), found (self, y, mask=None)",
        "function train: expected (gpu, model), found (model, epochs=10, **options)",
    ]
    assert told(STUB, "Net = 1\nclass train: ...") == [
        "class Net(Module): expected, not found",
        "function train(gpu, model): expected, not found",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "if version > 2:\n    pass\nelse:\n    {}",
        "try:\n    import a\nexcept ImportError:\n    {}",
        "with warnings.catch_warnings():\n    {}",
        "match version:\n    case 1:\n        {}",
    ],
)
def test_what_stands_under_a_condition_counts(source: str) -> None:
    assert told("def f(a): ...", source.format("def f(a): ...")) == []
    assert told("def f(a): ...", source.format("def g(a): ...")) != []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\ndef f(:\n", "not valid Python: invalid syntax (line 2)"),
        ("x = 1\0\n", "not valid Python: source code string cannot contain null bytes"),
        ("x = " + "-" * 100_000 + "1", "not valid Python: "),
    ],
)
def test_sources_that_are_not_python(source: str, reason: str) -> None:
    (found,) = told(STUB, source)
    assert found.startswith(reason)
    assert "\n" not in found


def test_nothing_is_executed(tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    opened = f"open({str(witness)!r}, 'w')"
    source = f"{opened}\ndef f(a={opened}): ...\n@{opened}\nclass Net({opened}):\n    {opened}\nraise SystemExit\n"
    assert told("def f(a=...): ...\nclass Net: ...", source) == []
    assert not witness.exists()


@st.composite
def parameter_lists(draw: st.DrawFn, *, stub: bool) -> str:
    """Of a stub those that adapters write; of a source all that Python has."""
    names = draw(st.permutations("abcd")) if draw(st.integers(0, 3)) == 0 else list("abcd")  # else few would fit
    count = draw(st.integers(0, 4))
    positional = draw(st.integers(0, count))
    optional = draw(st.integers(0, positional))
    words = [f"{name}=0" if i >= positional - optional else name for i, name in enumerate(names[:positional])]
    if not stub and positional and draw(st.integers(0, 3)) == 0:
        words.insert(draw(st.integers(1, positional)), "/")
    if not stub and draw(st.booleans()):
        words.append("*args")
    elif count > positional:
        words.append("*")
    words += [f"{name}=0" if draw(st.booleans()) else name for name in names[positional:count]]
    return ", ".join([*words, *(["**kwargs"] if not stub and draw(st.booleans()) else [])])


def function(parameters: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def f({parameters}): pass", scope)
    return scope["f"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(parameter_lists(stub=True), parameter_lists(stub=False), st.data())
def test_every_call_that_fits_the_stub_fits_the_source(stub: str, source: str, data: st.DataObject) -> None:
    if told(f"def f({stub}): ...", f"def f({source}): ..."):
        return
    wanted, have = inspect.signature(function(stub)), inspect.signature(function(source))
    count = data.draw(st.integers(0, len(wanted.parameters)))
    words = dict.fromkeys(data.draw(st.sets(st.sampled_from("abcd"))), 0)
    try:
        wanted.bind(*range(count), **words)
    except TypeError:
        return
    have.bind(*range(count), **words)


@pytest.mark.parametrize(
    ("stub", "source"),
    [("a, b", "a, b=1"), ("a", "a, *args, c=1, **kwargs"), ("*, k", "k"), ("*, k", "**kwargs"), ("a=...", "a=0, b=1")],
)
def test_signatures_that_fit(stub: str, source: str) -> None:
    assert told(f"def f({stub}): ...", f"def f({source}): ...") == []


@pytest.mark.parametrize(
    ("stub", "source"),
    [
        ("a, b", "b, a"),
        ("a=...", "a"),
        ("a", "a, b"),
        ("a", "a, *, k"),
        ("a", "a, /"),
        ("*, k", ""),
        ("a", "*args"),
        ("*, k=...", ""),
        ("a=...", "a=0, /"),
    ],
)
def test_signatures_that_do_not(stub: str, source: str) -> None:
    (found,) = told(f"def f({stub}): ...", f"def f({source}): ...")
    assert found == f"function f: expected ({stub}), found ({source})"


# Folders


CHECKOUT = Checkout("me/net", ("main.py",), {"models/net.py": "class Net(Module): ..."})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "clone" / "models").mkdir(parents=True)
    (tmp_path / "clone" / "main.py").write_text("from models.net import Net\n")
    (tmp_path / "clone" / "models" / "net.py").write_text("class Net(nn.Module): ...\n")
    return tmp_path / "clone"


def committed(root: Path) -> str:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-q", "-m", "first")
    return git(root, "rev-parse", "HEAD").strip()


def test_a_checkout_and_its_commit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_layout(root, CHECKOUT) == Layout(None, False, ())
    head = committed(root)
    tried = Checkout(CHECKOUT.repository, CHECKOUT.scripts, CHECKOUT.shape, (head,))
    assert read_layout(root, CHECKOUT) == Layout(head, False, ())
    assert read_layout(root, tried) == Layout(head, True, ())
    assert read_commit(root / "models") is None, "a folder of the checkout is not its top"
    git(root, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    assert read_commit(tmp_path / "linked") == head
    assert read_commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_commit(root) is None, "git is not installed"


def test_a_repository_without_a_commit(root: Path) -> None:
    git(root, "init", "-q")
    assert read_commit(root) is None


def test_in_words() -> None:
    head = "abcdef0123456789"
    assert str(Layout(head, True, ())) == "at commit abcdef0"
    assert str(Layout(head, True, ("x",))) == "at commit abcdef0: the layout is not the expected one"
    new = "at commit abcdef0, which the adapter was not tested on: the layout is the expected one"
    assert str(Layout(head, False, ())) == new
    assert str(Layout(None, False, ())) == "without a git commit: the layout is the expected one"


def test_files_that_are_not_as_expected(root: Path, tmp_path: Path) -> None:
    missing = ("main.py: expected, not found", "models/net.py: expected, not found")
    assert read_layout(tmp_path, CHECKOUT).differences == missing
    assert read_layout(tmp_path / "nowhere", CHECKOUT).differences == missing
    assert read_layout(root / "main.py", CHECKOUT).differences == missing
    assert fits(root, CHECKOUT)
    (root / "main.py").unlink()
    (root / "main.py").mkdir()
    (root / "models" / "net.py").write_text("class Other: ...\n")
    assert read_layout(root, CHECKOUT).differences == (
        "main.py: cannot be read (Is a directory)",
        "models/net.py: class Net(Module): expected, not found",
    )
    assert not fits(root, CHECKOUT)
