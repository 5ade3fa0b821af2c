"""Is this folder a checkout of that upstream, and at which commit? Files are parsed, never executed.

An adapter writes the layout it counts on as stubs. A file fits its stub if it holds every class, function and method
of it, and every call that fits the stub fits the file. The file may hold more.
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
    """What a folder is, compared with what an adapter patches."""

    commit: str | None
    """The commit that git has checked out, if the folder is the top of a git work tree."""
    tried: bool
    """The adapter was tried on that commit."""
    differences: tuple[str, ...]
    """One line for each thing that the adapter counts on and that is not there."""

    @property
    def fits(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        at = f"at commit {self.commit[:7]}" if self.commit else "without a git commit"
        if self.tried and self.fits:
            return at
        new = "" if self.tried else ", which the adapter was not tried on"
        return f"{at}{new}: {'the same' if self.fits else 'another'} shape"


def layout(root: Path, checkout: Checkout) -> Layout:
    """Compare a folder with what an adapter patches."""
    found = commit(root)
    return Layout(found, found in checkout.commits, tuple(_differences(root, checkout)))


def fits(root: Path, checkout: Checkout) -> bool:
    """Whether a folder is a checkout of that kind, whatever its commit."""
    return next(_differences(root, checkout), None) is None


def commit(root: Path) -> str | None:
    """What git has checked out; None without git, and for a folder that is not the top of a work tree."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    command = ["git", "-C", str(root), "rev-parse", "--show-cdup", "HEAD"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    to_top, _, head = done.stdout.partition("\n")
    return head.strip() if not to_top else None


def _differences(root: Path, checkout: Checkout) -> Iterator[str]:
    for file in (*checkout.scripts, *checkout.shape):
        try:
            source = (root / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            yield f"{file}: expected, not found"
        except OSError as error:
            yield f"{file}: cannot be read ({error.strerror})"
        else:
            for difference in differences(checkout.shape.get(file, ""), source):
                yield f"{file}: {difference}"


def differences(stub: str, source: bytes) -> Iterator[str]:
    """What the stub has and the source has not, a line each."""
    try:
        found = _declared(source)
    except UNREADABLE as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield f"not valid Python{line}: {error.msg if isinstance(error, SyntaxError) else error or 'nested too deeply'}"
        return
    absent: list[str] = []
    for name, wanted in _declared(textwrap.dedent(stub).encode()).items():
        have = found.get(name)
        if name.startswith(tuple(f"{parent}." for parent in absent)):
            continue  # the missing class says it all
        if type(have) is not type(wanted):
            absent.append(name)
            what = "function" if isinstance(wanted, Signature) else "class"
            yield f"{what} {name}{_shown(wanted)}: expected, not found"
        elif isinstance(wanted, Signature) and isinstance(have, Signature):
            if not _accepts(have, wanted):
                yield f"{name}: expected {_shown(wanted)}, found {_shown(have)}"
        elif isinstance(wanted, tuple) and isinstance(have, tuple) and not set(wanted) <= set(have):
            yield f"class {name}: expected bases {_shown(wanted)}, found {_shown(have)}"


Declared = Signature | tuple[str, ...]
"""How a function is called, or the last part of the name of each base of a class."""


def _declared(source: bytes) -> dict[str, Declared]:
    """Every class, method and function by its dotted name. What stands under a condition counts too."""
    found: dict[str, Declared] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = _signature(child.args)
            elif isinstance(child, ast.ClassDef):
                found[prefix + child.name] = tuple(map(_last_name, child.bases))
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                walk(child, prefix)

    walk(parse(source), "")
    return found


def _last_name(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _shown(declared: Declared) -> str:
    return str(declared).replace("Ellipsis", "...") if isinstance(declared, Signature) else f"({', '.join(declared)})"


def _signature(args: ast.arguments) -> Signature:
    def of(arg: ast.arg, kind: Any, optional: bool = False) -> Parameter:
        return Parameter(arg.arg, kind, default=... if optional else Parameter.empty)

    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    found = [of(arg, Parameter.POSITIONAL_ONLY, n >= required) for n, arg in enumerate(args.posonlyargs)]
    plain = enumerate(args.args, len(found))
    found += [of(arg, Parameter.POSITIONAL_OR_KEYWORD, n >= required) for n, arg in plain]
    found += [of(args.vararg, Parameter.VAR_POSITIONAL)] if args.vararg else []
    keyword = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [of(arg, Parameter.KEYWORD_ONLY, default is not None) for arg, default in keyword]
    found += [of(args.kwarg, Parameter.VAR_KEYWORD)] if args.kwarg else []
    return Signature(found)


def _accepts(have: Signature, wanted: Signature) -> bool:
    """Whether the calls that ``wanted`` names fit ``have``: the shortest and the longest, by position and by name."""
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
