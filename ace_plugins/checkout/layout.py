"""Compares a folder with the layout that an adapter expects. Files are parsed, never executed.

The adapter gives the layout as stubs. A file fits its stub if it has all of the stub's classes, functions and methods,
and every call that fits the stub's signature also fits the file's. The file may contain more than the stub.
"""

from __future__ import annotations

import ast
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract.upstreams import Checkout
from .marking import parse


@dataclass(frozen=True)
class Layout:
    """The result of comparing a folder with the layout that an adapter expects."""

    commit: str | None  # the commit that git has checked out; None if the folder is not the top of a git repository
    tried: bool  # True if the adapter was tested on that commit
    differences: tuple[str, ...]  # one line for each part that the adapter expects and the folder lacks

    def __str__(self) -> str:
        at = f"at commit {self.commit[:7]}" if self.commit else "without a git commit"
        if self.tried and not self.differences:
            return at
        new = ", which the adapter was not tested on" if self.commit and not self.tried else ""
        return f"{at}{new}: the layout is {'not ' if self.differences else ''}the expected one"


def read_layout(root: Path, checkout: Checkout) -> Layout:
    found = read_commit(root)
    return Layout(found, found in checkout.commits, tuple(_compare(root, checkout)))


def fits(root: Path, checkout: Checkout) -> bool:
    """Return whether a folder has the layout that an adapter expects, at any commit."""
    return next(_compare(root, checkout), None) is None


def read_commit(root: Path) -> str | None:
    """Return the commit that git has checked out; None without git, or if the folder is not the top of a repository."""
    command = ["git", "-C", str(root), "rev-parse", "--show-cdup", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    to_top, _, head = done.stdout.partition("\n")
    return head.strip() if not to_top else None


def _compare(root: Path, checkout: Checkout) -> Iterator[str]:
    for file in (*checkout.scripts, *checkout.shape):
        try:
            source = (root / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            yield f"{file}: expected, not found"
        except OSError as error:
            yield f"{file}: cannot be read ({error.strerror})"
        else:
            for difference in find_differences(checkout.shape.get(file, ""), source):
                yield f"{file}: {difference}"


def find_differences(stub: str, source: bytes) -> Iterator[str]:
    """Yield one line for each part of the stub that the source lacks."""
    try:
        found = _read_declarations(source)
    except ValueError as error:
        yield f"not valid Python: {error}"
        return
    absent: set[str] = set()
    for name, wanted in _read_declarations(textwrap.dedent(stub).encode()).items():
        have, what = found.get(name), "class" if isinstance(wanted, tuple) else "function"
        if type(have) is not type(wanted):
            absent.add(name)
            if name.rpartition(".")[0] not in absent:
                yield f"{what} {name}{_format(wanted)}: expected, not found"
        elif not _accepts(have, wanted):
            yield f"{what} {name}: expected {_format(wanted)}, found {_format(have)}"


Declaration = ast.arguments | tuple[str, ...]
"""The parameters of a function, or the unqualified names of a class's bases."""


def _read_declarations(source: bytes) -> dict[str, Declaration]:
    """Return a mapping from dotted names to all classes, methods and functions, also those inside ``if`` or ``try``."""
    found: dict[str, Declaration] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = child.args
            elif isinstance(child, ast.ClassDef):
                bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in child.bases)
                found[prefix + child.name] = tuple(bases)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                walk(child, prefix)

    walk(parse(source), "")
    return found


def _format(found: Any) -> str:
    return f"({', '.join(found) if isinstance(found, tuple) else ast.unparse(found)})"


def _accepts(have: Any, wanted: Any) -> bool:
    """Return whether a class has all wanted bases, or a function accepts every call that the wanted one accepts."""
    if isinstance(wanted, tuple):
        return set(wanted) <= set(have)
    first, positional, keyword = ([arg.arg for arg in args] for args in (wanted.args, have.args, have.kwonlyargs))
    return (
        not have.posonlyargs
        and positional[: len(first)] == first
        and (have.kwarg is not None or {arg.arg for arg in wanted.kwonlyargs} <= {*positional, *keyword})
        and _required(have) <= _required(wanted)
    )


def _required(args: ast.arguments) -> set[str]:
    positional = args.args[: len(args.args) - len(args.defaults)]
    keyword = [arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    return {arg.arg for arg in (*positional, *keyword)}
