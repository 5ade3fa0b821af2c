"""Writes docs/architecture.md from the code itself: the folders from top to bottom, their sizes, what they import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ace_plugins"
LAYERS = (
    ("activate", "__main__"),
    ("cli",),
    ("scaffold", "testing"),
    ("compare",),
    ("run",),
    ("report",),
    ("checkout",),
    ("patch",),
    ("engine",),
    ("plugins",),
    ("actions",),
    ("symmetry", "settings"),
    ("contract",),
    ("files", "later", "pictures", "telling"),
    ("errors",),
)
"""From the top down; what stands side by side does not know of each other. The same order is in pyproject.toml."""

HEAD = """\
# The architecture

Written by `python docs/write_architecture.py`; a test checks that it is up to date.

A host that knows the dual loop but no architecture, adapters that know one architecture but not the dual loop, and a
contract of a few pluggy hooks between them. Folders are the concepts. Imports go down this list only: import-linter
holds it (`tox run -e lint`), and no module of ours is imported inside a function to get round it. What needs torch, in
places that most processes pass without needing it, is imported by `later("ace_plugins....")`, whose names count as
imports here.
`contract`, `settings`, `plugins` and `checkout` never import torch.

| folder | what lives there | modules | lines | imports |
|---|---|---|---|---|
"""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the host."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether inside a function) of our own modules that a module imports, those of `later` too.

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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).lower() == "later":
            named = node.args[0] if node.args else None
            if isinstance(named, ast.Constant) and named.value in known:
                yield named.value, node.lineno, False
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, inside) for child in ast.iter_child_nodes(node))


def folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def rounded(count: int) -> str:
    """To tens, so that not every commit changes the page."""
    return f"{max(10, round(count, -1)):,}"


def first_line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"\s+", " ", doc.split("\n\n")[0]).replace("|", "\\|")


def page() -> str:
    known = modules()
    names = set(known)
    uses: dict[str, set[str]] = {}
    for name, path in known.items():
        for module, _, _ in imports(name, path, names):
            uses.setdefault(folder(name), set()).add(folder(module))
    order = [name for layer in LAYERS for name in layer]
    rows, parts = [], []
    for name in order:
        inside = {m: p for m, p in known.items() if folder(m) == name}
        about = next(iter(inside.values()))
        below = ", ".join(f"`{other}`" for other in order if other in uses.get(name, ()) and other != name)
        size = sum(map(lines, inside.values()))
        is_folder = about.name == "__init__.py"
        label = f"`{name}/`" if is_folder else f"`{name}.py`"
        count = len(inside) - 1 if is_folder else 1
        rows.append(f"| {label} | {first_line(about)} | {count} | {rounded(size)} | {below} |")
        if is_folder:
            listed = [
                f"| `{module.rpartition('.')[2]}` | {first_line(path)} | {rounded(lines(path))} |"
                for module, path in inside.items()
                if path.name != "__init__.py"
            ]
            parts.append(f"\n## {name}/\n\n| module | | lines |\n|---|---|---|\n" + "\n".join(listed) + "\n")
    total = rounded(sum(map(lines, known.values())))
    surface = "`__init__.py` is the public surface, for users and adapters alike; its names are loaded on first use."
    return HEAD + "\n".join(rows) + f"\n\n{len(known)} modules, {total} lines. {surface}\n" + "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.md").write_text(page(), encoding="utf-8")
