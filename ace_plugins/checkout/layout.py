"""Compares a folder with the layout that an adapter expects. Files are parsed, never executed.

The adapter gives the layout as stubs. A file fits its stub if it has all of the stub's classes, functions and methods,
and every call that fits the stub's signature also fits the file's. The file may contain more than the stub.
"""

from __future__ import annotations

import ast
import os
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from ..contract.upstreams import Checkout
from .marking import UNREADABLE, parse


@dataclass(frozen=True)
class Layout:
    """The result of comparing a folder with the layout that an adapter expects."""

    commit: str | None
    """The commit that git has checked out; None if the folder is not the top of a git work tree."""
    tried: bool
    """True if the adapter was tested on that commit."""
    differences: tuple[str, ...]
    """One line for each part that the adapter expects and the folder lacks."""

    @property
    def fits(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        at = f"at commit {self.commit[:7]}" if self.commit else "without a git commit"
        if self.tried and self.fits:
            return at
        new = "" if self.tried else ", which the adapter was not tested on"
        return f"{at}{new}: {'the same' if self.fits else 'another'} layout"


def read_layout(root: Path, checkout: Checkout) -> Layout:
    """Compare a folder with the layout that an adapter expects."""
    found = read_commit(root)
    return Layout(found, found in checkout.commits, tuple(_compare(root, checkout)))


def fits(root: Path, checkout: Checkout) -> bool:
    """Return whether a folder has the layout of this checkout, whatever its commit is."""
    return next(_compare(root, checkout), None) is None


def read_commit(root: Path) -> str | None:
    """Return the commit that git has checked out; None without git, or if the folder is not the top of a work tree."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    command = ["git", "-C", str(root), "rev-parse", "--show-cdup", "HEAD"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
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
    except UNREADABLE as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield f"not valid Python{line}: {error.msg if isinstance(error, SyntaxError) else error or 'nested too deeply'}"
        return
    absent: list[str] = []
    for name, wanted in _read_declarations(textwrap.dedent(stub).encode()).items():
        have = found.get(name)
        if name.startswith(tuple(f"{parent}." for parent in absent)):
            continue  # the class that contains it is missing and has been reported
        if type(have) is not type(wanted):
            absent.append(name)
            what = "function" if isinstance(wanted, Signature) else "class"
            yield f"{what} {name}{_format(wanted)}: expected, not found"
        elif isinstance(wanted, Signature) and isinstance(have, Signature):
            if not _accepts(have, wanted):
                yield f"{name}: expected {_format(wanted)}, found {_format(have)}"
        elif isinstance(wanted, tuple) and isinstance(have, tuple) and not set(wanted) <= set(have):
            yield f"class {name}: expected bases {_format(wanted)}, found {_format(have)}"


Declaration = Signature | tuple[str, ...]
"""The signature of a function, or the unqualified names of a class's bases."""


def _read_declarations(source: bytes) -> dict[str, Declaration]:
    """Return a mapping from dotted names to all classes, methods and functions, also those inside ``if`` or ``try``."""
    found: dict[str, Declaration] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = _read_signature(child.args)
            elif isinstance(child, ast.ClassDef):
                bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in child.bases)
                found[prefix + child.name] = tuple(bases)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                walk(child, prefix)

    walk(parse(source), "")
    return found


def _format(found: Declaration) -> str:
    return str(found).replace("Ellipsis", "...") if isinstance(found, Signature) else f"({', '.join(found)})"


def _read_signature(args: ast.arguments) -> Signature:
    def make(arg: ast.arg, kind: Any, optional: bool = False) -> Parameter:
        return Parameter(arg.arg, kind, default=... if optional else Parameter.empty)

    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    found = [make(arg, Parameter.POSITIONAL_ONLY, n >= required) for n, arg in enumerate(args.posonlyargs)]
    plain = enumerate(args.args, len(found))
    found += [make(arg, Parameter.POSITIONAL_OR_KEYWORD, n >= required) for n, arg in plain]
    found += [make(args.vararg, Parameter.VAR_POSITIONAL)] if args.vararg else []
    keyword = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [make(arg, Parameter.KEYWORD_ONLY, default is not None) for arg, default in keyword]
    found += [make(args.kwarg, Parameter.VAR_KEYWORD)] if args.kwarg else []
    return Signature(found)


def _accepts(have: Signature, wanted: Signature) -> bool:
    """Return whether ``have`` accepts the shortest and the longest call of ``wanted``, each by position and by name."""
    plain = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if [*have.parameters][: len(plain)] != [p.name for p in plain]:
        return False
    try:
        for every in (True, False):
            first, last = ({p.name: 0 for p in part if every or p.default is p.empty} for part in (plain, keyword))
            have.bind(*first, **last)
            have.bind(**first, **last)
    except TypeError:
        return False
    return True
