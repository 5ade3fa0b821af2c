"""The house: imports go one way, adapters know the surface alone, and the page that shows it is up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ace_plugins

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("write_architecture", ROOT / "docs" / "write_architecture.py")
assert spec is not None
assert spec.loader is not None
house: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)
KNOWN = house.modules()
EDGES = [(name, *edge) for name, path in KNOWN.items() for edge in house.imports(name, path, set(KNOWN))]


def test_imports_go_down_the_house() -> None:
    floor = {name: number for number, layer in enumerate(house.LAYERS) for name in layer}
    assert {house.folder(name) for name in KNOWN} - {""} == set(floor), "every folder has its floor"
    wrong = [
        f"{name} line {line} imports {module}"
        for name, module, line, _ in EDGES
        if house.folder(name) != house.folder(module)
        and house.folder(name)
        and house.folder(module)
        and floor[house.folder(name)] >= floor[house.folder(module)]
    ]
    assert not wrong
    assert len(EDGES) > 100


def test_nothing_of_ours_is_imported_inside_a_function() -> None:
    assert [edge for edge in EDGES if edge[3]] == []


def test_the_linter_knows_the_same_house() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    layers = [tuple(re.findall(r"\w+", line)) for line in listed[1].splitlines()]
    assert layers == [tuple(layer) for layer in house.LAYERS]


def test_modules_do_not_import_each_other_in_circles() -> None:
    uses: dict[str, set[str]] = {}
    for name, module, _, _ in EDGES:
        if name != module and module != "ace_plugins":
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


def test_the_page_of_the_architecture_is_up_to_date() -> None:
    written = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert written == house.page(), "run python docs/write_architecture.py"


@pytest.mark.parametrize("adapter", sorted(p.parent.name for p in ROOT.glob("adapters/*/pyproject.toml")))
def test_adapters_import_the_surface_alone(adapter: str) -> None:
    for path in (ROOT / "adapters" / adapter).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                behind = [alias.name for alias in node.names if alias.name.startswith("ace_plugins.")]
                assert not behind, f"{path.name} line {node.lineno}: import ace_plugins"
            elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ace_plugins":
                assert node.module == "ace_plugins", f"{path.name} line {node.lineno}: from ace_plugins import ..."
                assert {alias.name for alias in node.names} <= set(ace_plugins.__all__)


def test_the_surface_is_what_it_says() -> None:
    assert sorted(ace_plugins.__all__) == sorted(ace_plugins._HOME)
    for name in ace_plugins.__all__:
        assert getattr(ace_plugins, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = ace_plugins.atach


def test_adapters_and_what_needs_no_torch_do_not_import_it() -> None:
    light = [name for name in KNOWN if house.folder(name) in ("contract", "settings", "plugins", "checkout")]
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
