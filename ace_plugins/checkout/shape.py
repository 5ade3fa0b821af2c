"""The shape of source files: classes and signatures, read by parsing. Nothing of upstream is imported or executed.

An adapter writes the shape it counts on as a stub. A file has that shape if it holds every class, function and
method of the stub, with its parameters in their order. It may hold more: other functions, and further parameters
as long as nobody has to pass them.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    name: str
    optional: bool

    def __str__(self) -> str:
        return f"{self.name}=..." if self.optional else self.name


@dataclass(frozen=True)
class Signature:
    """How a function can be called."""

    positional: tuple[Parameter, ...]
    keyword: tuple[Parameter, ...]
    open_ended: bool
    """It takes any further keywords (``**kwargs``)."""
    unnamed: int = 0
    """How many of the positional ones cannot be given by name: those before ``/``."""
    any_number: bool = False
    """It takes any further positional arguments (``*args``)."""

    def __str__(self) -> str:
        words = [*map(str, self.positional)]
        if self.unnamed:
            words.insert(self.unnamed, "/")
        if self.any_number or self.keyword:
            words.append("*args" if self.any_number else "*")
        return f"({', '.join([*words, *map(str, self.keyword), *(['**kwargs'] if self.open_ended else [])])})"


@dataclass(frozen=True)
class Bases:
    """What a class is derived from, by the last part of each name."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"({', '.join(self.names)})"


Shape = dict[str, Signature | Bases]
"""Per dotted name ("Net", "Net.forward", "train") what is declared there."""


def shape_of(source: bytes | str) -> Shape:
    """Every class, method and function of a file, at whatever depth of classes. Raises SyntaxError or ValueError.

    What is declared under a condition, as for some versions of a library, counts as declared; of what is declared
    twice, the last one counts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their escapes and comparisons: not ours to tell
        try:
            return _declared(ast.parse(source))
        except (RecursionError, MemoryError) as error:
            raise ValueError("nested too deeply") from error


def differences(stub: str, source: bytes | str) -> Iterator[str]:
    """What the stub has and the source has not, a line each."""
    try:
        found = shape_of(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        reason = " ".join(str(getattr(error, "msg", error)).split())
        yield f"not valid Python{f' in line {line}' if line else ''}: {reason}"
        return
    absent: list[str] = []
    for name, wanted in shape_of(textwrap.dedent(stub)).items():
        have = found.get(name)
        what = "class" if isinstance(wanted, Bases) else "function"
        if any(name.startswith(f"{parent}.") for parent in absent):
            continue  # the missing class says it all
        if have is None or type(have) is not type(wanted):
            absent.append(name)
            yield f"{what} {name}{wanted}: expected, not found"
        elif isinstance(wanted, Bases) and isinstance(have, Bases):
            missing = [base for base in wanted.names if base not in have.names]
            if missing:
                yield f"class {name}: expected bases {wanted}, found {have}"
        elif isinstance(wanted, Signature) and isinstance(have, Signature) and not _fits(wanted, have):
            yield f"{name}: expected {wanted}, found {have}"


def _fits(wanted: Signature, have: Signature) -> bool:
    """Every call that fits ``wanted`` fits ``have``."""
    same = list(zip(wanted.positional, have.positional, strict=False))
    if len(same) < len(wanted.positional) or any(w.name != h.name for w, h in same):
        return False
    if wanted.any_number > have.any_number or wanted.open_ended > have.open_ended:
        return False
    if min(have.unnamed, len(same)) > wanted.unnamed:
        return False
    further = have.positional[len(same) :]
    named = {p.name: p for p in (*have.positional[max(len(same), have.unnamed) :], *have.keyword)}
    asked = {p.name for p in wanted.keyword}
    if not have.open_ended and not asked <= set(named):
        return False
    if wanted.any_number and not asked.isdisjoint(p.name for p in further):
        return False  # what went to *args goes there now
    passed = {p.name for p in wanted.keyword if not p.optional and p.name in named}
    return all(h.optional or not w.optional for w, h in same) and all(
        p.optional or p.name in passed for p in (*further, *have.keyword)
    )


def _declared(tree: ast.Module) -> Shape:
    found: Shape = {}
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not any(isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter") for d in node.decorator_list):
                _declare(found, prefix + node.name, _signature(node.args))
            continue
        if isinstance(node, ast.ClassDef):
            _declare(found, prefix + node.name, Bases(tuple(map(_last_name, node.bases))))
            prefix = f"{prefix}{node.name}."
        inside = [n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.stmt, ast.excepthandler, ast.match_case))]
        todo.extend((prefix, each) for each in reversed(inside))
    return found


def _declare(found: Shape, name: str, what: Signature | Bases) -> None:
    if name in found:
        for gone in [known for known in found if known.startswith(f"{name}.")]:
            del found[gone]  # the methods of the class before
    found[name] = what


def _signature(args: ast.arguments) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    return Signature(
        tuple(Parameter(arg.arg, number >= required) for number, arg in enumerate(positional)),
        tuple(
            Parameter(arg.arg, default is not None)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ),
        args.kwarg is not None,
        len(args.posonlyargs),
        args.vararg is not None,
    )


def _last_name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript):
        base = base.value  # Generic[T]
    return base.attr if isinstance(base, ast.Attribute) else " ".join(ast.unparse(base).split())
