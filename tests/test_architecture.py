"""The architecture: imports go one way, adapters use the public API alone, and light modules do not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ace_plugins
from ace_plugins import adapter

ROOT = Path(__file__).parents[1]
PUBLIC = {"ace_plugins": ace_plugins, "ace_plugins.adapter": adapter}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the host."""
    found = {}
    for path in sorted((ROOT / "ace_plugins").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether inside a function) of our own modules that a module imports.

    What is imported for type checkers alone does not count.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                full = f"{module}.{alias.name}"
                if full in known or module in known:
                    yield full if full in known else module, node.lineno, inside
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, inside) for child in ast.iter_child_nodes(node))


def folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


KNOWN = modules()
EDGES = [(name, *edge) for name, path in KNOWN.items() for edge in imports(name, path, set(KNOWN))]


def test_modules_do_not_import_each_other_in_circles() -> None:
    uses: dict[str, set[str]] = {}
    for name, module, _, inside in EDGES:
        if name != module and module != "ace_plugins" and not inside:
            uses.setdefault(name, set()).add(module)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for module in sorted(uses.get(name, ())):
                visit(module, (*path, name))
            done.add(name)

    for name in KNOWN:
        visit(name, ())
    assert len(EDGES) > 100


@pytest.mark.parametrize("name", sorted(p.parent.name for p in ROOT.glob("adapters/*/pyproject.toml")))
def test_adapters_import_only_the_public_api(name: str) -> None:
    for path in (ROOT / "adapters" / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name} line {node.lineno}" if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            if isinstance(node, ast.Import):
                ours = {alias.name for alias in node.names if alias.name.startswith("ace_plugins")}
                assert ours <= PUBLIC.keys(), where
            elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ace_plugins":
                assert node.module in PUBLIC, where
                assert {alias.name for alias in node.names} <= {*PUBLIC[node.module].__all__, "adapter"}, where


@pytest.mark.parametrize("home", PUBLIC.values(), ids=PUBLIC)
def test_every_public_name_can_be_imported(home: object) -> None:
    for name in home.__all__:  # type: ignore[attr-defined]
        assert getattr(home, name) is not None
    assert set(home.__all__) <= set(dir(home))  # type: ignore[attr-defined]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="'atach'"):
        _ = ace_plugins.atach  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "home"), [("Site", "ace_plugins.adapter"), ("Status", "ace_plugins.report.status")])
def test_names_that_moved_still_work_and_warn(name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import it from {home}"):
        found = getattr(ace_plugins, name)
    assert found is getattr(sys.modules[home], name)


def test_the_module_of_actions_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="ace_plugins.adapter"):
        from ace_plugins.actions import E3
    assert E3 is adapter.E3


def test_using_the_adapter_api_leaves_the_smaller_api_as_it_is() -> None:
    assert adapter.Vectors is not None
    with pytest.warns(DeprecationWarning, match="has moved"):
        _ = ace_plugins.Vectors  # type: ignore[attr-defined]


def test_adapters_and_what_needs_no_torch_do_not_import_it() -> None:
    light = [name for name in KNOWN if folder(name) in ("contract", "settings", "plugins", "checkout")]
    adapters = [path.parent for path in sorted(ROOT.glob("adapters/*/pyproject.toml"))]
    plugins = [f"ace_{adapter.name}.plugin" for adapter in adapters]
    names = [*light, *plugins, "ace_plugins.cli.main", "ace_plugins.run.launch", "ace_plugins.report.observers"]
    # Also those that are not installed here: not all of them can be, in one environment.
    code = f"import sys, importlib\nsys.path += {list(map(str, adapters))}\n"
    code += f"for name in {names}: importlib.import_module(name)\n"
    heavy = "{'torch', 'torch_geometric', 'e3nn', 'mace', 'nequip', 'schnetpack', 'torchmdnet'}"
    code += f"print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
