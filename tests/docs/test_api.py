"""The API reference lists every public name, and public functions document arguments, results and exceptions."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import ace_plugins
import ace_plugins.testing
from ace_plugins import adapter

PAGES = {
    "ace_plugins": (ace_plugins, "train.md"),
    "ace_plugins.adapter": (adapter, "adapter.md"),
    "ace_plugins.testing": (ace_plugins.testing, "testing.md"),
}
API = Path(__file__).parents[2] / "docs" / "api"


@pytest.mark.parametrize("home", PAGES)
def test_the_reference_lists_every_public_name(home: str) -> None:
    module, page = PAGES[home]
    listed = re.findall(rf"^::: {re.escape(home)}\.(\w+)$", (API / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(module.__all__)


def sections(docstring: str) -> dict[str, str]:
    """Split a Google-style docstring into its sections, by title; the text before them has the title ''."""
    parts = re.split(
        r"^(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):\s*$", docstring, flags=re.MULTILINE
    )
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section: str) -> set[str]:
    """Names documented in an Args or Raises section: the words before a colon at the section's own indent."""
    lines = textwrap.dedent(section.strip("\n")).splitlines()
    return {
        name.strip("*` ")
        for line in lines
        if (found := re.match(r"([\w*`., ]+?)(?: \(.*\))?:(?:\s|$)", line))
        for name in found[1].split(",")
    }


def raised(function: Callable[..., Any]) -> set[str]:
    """Exceptions that the function itself raises, by name; those of its inner functions do not count."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    found, todo = set(), list(ast.iter_child_nodes(tree))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func).rpartition(".")[2])
        todo.extend(ast.iter_child_nodes(node))
    return {
        name
        for name in found
        if name.endswith(("Error", "Warning", "Exit", "Exception")) and name != "NotImplementedError"
    }


def missing(function: Callable[..., Any]) -> list[str]:
    """What the docstring of a function leaves out: parameters, the return value, exceptions.

    A method may describe simple arguments and its result in the summary ("Return x [..., d] plus the translation."),
    and one without a docstring inherits that of its base class.
    """
    text = inspect.getdoc(function) or ""
    found = sections(text)
    signature = inspect.signature(function)
    is_method = "." in function.__qualname__
    described = set(re.findall(r"\w+", found[""])) if is_method else set()
    documented = described | entries(found.get("Args", ""))
    left = [name for name in signature.parameters if name not in ("self", "cls") and name not in documented]
    returns = signature.return_annotation not in ("None", "NoReturn", "Iterator[None]", None)
    summary = text.partition("\n")[0].lower()
    if returns and not ({"Returns", "Yields"} & found.keys()) and not (is_method and "return" in summary):
        left.append("Returns")
    return left + [name for name in raised(function) if name not in entries(found.get("Raises", "")) | described]


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions of the public modules, and the public methods that public classes define themselves."""
    for home, (module, _) in PAGES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, FunctionType):
                yield f"{home}.{name}", inspect.unwrap(value)
            elif inspect.isclass(value):
                for method, function in vars(value).items():
                    function = getattr(function, "__func__", function)
                    if isinstance(function, FunctionType) and not method.startswith("_") and method != "forward":
                        yield f"{home}.{name}.{method}", inspect.unwrap(function)


@pytest.mark.parametrize(("name", "function"), [pytest.param(*each, id=each[0]) for each in functions()])
def test_a_public_function_documents_arguments_result_and_exceptions(name: str, function: Callable[..., Any]) -> None:
    left = missing(function)
    assert not left, f"{name} does not document {', '.join(left)}"


def test_every_public_class_has_a_docstring() -> None:
    classes = [(home, name, getattr(module, name)) for home, (module, _) in PAGES.items() for name in module.__all__]
    found = [
        f"{home}.{name}" for home, name, value in classes if inspect.isclass(value) and not vars(value).get("__doc__")
    ]
    assert found == []


def example(count: int, *rest: str, **config: object) -> int:
    """Count.

    Args:
        count: How many,
            on two lines: like this.
        *rest: Ignored.
        **config (object): Settings.

    Returns:
        The count.

    Raises:
        ValueError: If count is negative.
    """
    if count < 0:
        raise ValueError(count)
    return count


def test_the_check_accepts_a_complete_docstring_and_reports_what_is_missing() -> None:
    assert missing(example) == []
    complete = example.__doc__ or ""
    for left_out in ("count:", "*rest:", "Returns:", "ValueError:"):
        example.__doc__ = complete.replace(left_out, "")
        assert missing(example) == [left_out.strip("*:")]
    example.__doc__ = complete


def test_ruff_checks_the_docstrings_of_all_public_modules() -> None:
    config = (API.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    checked = re.search(r'^"!ace_plugins/(.*)\.py" = \["D"\]$', config, re.MULTILINE)
    assert checked is not None
    stubs = ("__init__.pyi", "adapter.pyi")
    text = "".join((API.parents[1] / "ace_plugins" / stub).read_text(encoding="utf-8") for stub in stubs)
    for folder, module in re.findall(r"^from \.(?:(\w+)\.)?(\w+) import", text, re.MULTILINE):
        inside = re.search(rf"\b{folder}/(\{{[^}}]*\}}|\w+|\*)", checked[1]) if folder else checked
        assert inside is not None, f"{folder}/{module}"
        assert inside[1] == "*" or re.search(rf"\b{module}\b", inside[1]), f"{folder}/{module}"
