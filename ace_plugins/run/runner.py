"""Runs a script inside this process so that it behaves as under ``python script.py``."""

from __future__ import annotations

import builtins
import difflib
import glob
import io
import linecache
import os
import pkgutil
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from ..errors import AceError

_INTERPRETER = re.compile(r"pythonw?[\d.]*t?(\.exe)?", re.IGNORECASE)
_EXPECTED = "expected script.py, -m module or -c code"
_RUNNABLE = "a Python file, or a folder or zip file with __main__.py"
# From 3.11 on there is a flag of its own; before, only -I kept the script's folder off the path.
_SAFE_PATH = bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


class ScriptError(AceError):
    """A script that cannot be started: none given, missing, unreadable, or a folder without a main."""


class _Program(NamedTuple):
    argv: list[str]
    path0: str | None  # what takes the place of the launcher's sys.path[0]; None: the path stays as it is
    body: Callable[[dict[str, Any]], object]  # runs the program in the namespace of __main__


def run_script(argv: Sequence[str]) -> int:
    """Run ``script.py args``, ``-m module args`` or ``-c code args``; 0 when it came to its end.

    A SystemExit of the program is passed on. An exception nothing caught is reported as python reports
    it and ends in ``SystemExit(1)``; a KeyboardInterrupt is reported and passed on, since only the
    interpreter itself can end the process by SIGINT after its clean-up: do not catch it.
    Raises ScriptError, before anything is changed, if there is no such program.
    """
    program = _find(list(argv))
    sys.argv[:] = program.argv
    if program.path0 is not None:
        sys.path[: 0 if _SAFE_PATH else 1] = [program.path0]
    main = sys.modules["__main__"] = _fresh_main()
    error: BaseException | None = None
    try:
        program.body(vars(main))
    except SystemExit:
        raise
    except BaseException as raised:
        error = raised
    if error is None:
        return 0
    _report(error)  # out of the except block: to the hook, the exception is no longer being handled
    if type(error) is KeyboardInterrupt:
        sys.excepthook = lambda *_: None  # it has been reported
        raise error
    raise SystemExit(1)


def _find(argv: list[str]) -> _Program:
    """The program that the words name, as the interpreter would read them."""
    # A whole command, pasted from a README; its interpreter cannot differ from the running one.
    if argv and _is_interpreter(argv[0]) and (len(argv) > 1 or not os.path.exists(argv[0])):
        argv = argv[1:]
    if not argv or not argv[0]:
        raise ScriptError(f"no script given: {_EXPECTED}; add it, as in ace-patch run ADAPTER -- script.py")
    first, rest = argv[0], argv[1:]
    if first in ("-m", "-c"):
        if not rest:
            raise ScriptError(f"nothing after {first}: {_EXPECTED}; add what to run")
        if first == "-m":
            path0, body = os.getcwd(), partial(_run_module, rest[0], True)
        else:
            path0, body = "", partial(_run_code, rest[0])
        return _Program([first, *rest[1:]], None if _SAFE_PATH else path0, body)
    if first == "-":
        raise ScriptError(f"'-' (standard input) cannot be run: {_EXPECTED}; save the code to a file")
    if first.startswith("-"):
        do = f"give it to the interpreter, as in python {first} -m ace_plugins run ADAPTER -- script.py"
        raise ScriptError(f"{first!r} is an option, not a script: {_EXPECTED}; {do}")
    return _file(first, argv)


def _is_interpreter(word: str) -> bool:
    # The bare word is the interpreter even next to a folder of that name; a path may be the folder.
    folder, name = os.path.split(word)
    named = _INTERPRETER.fullmatch(name) and not (folder and os.path.isdir(word))
    return bool(named) or word == sys.executable


def _file(path: str, argv: list[str]) -> _Program:
    file = _absolute(path)
    importer = pkgutil.get_importer(file)
    if importer is not None:  # a folder or a zip file: the interpreter runs the __main__ in it
        spec = importer.find_spec("__main__")
        if spec is None or spec.loader is None:
            near = _nearest(os.path.join(path, "__main__.py"))
            raise ScriptError(f"no __main__.py in {path!r}: expected {_RUNNABLE}; {near}")
        return _Program(argv, file, partial(_run_module, "__main__", False))
    try:
        with io.open_code(file) as stream:
            source = stream.read()  # once, and now: it may be a pipe
    except (FileNotFoundError, NotADirectoryError):
        raise ScriptError(f"no script {path!r}: expected {_RUNNABLE}; {_nearest(path)}") from None
    except OSError as error:
        reason = f"cannot read script {path!r} ({error.strerror})"
        raise ScriptError(f"{reason}: expected {_RUNNABLE}; check its permissions") from error
    # The interpreter follows links on every system but Windows.
    folder = os.path.dirname(os.path.abspath(file) if os.name == "nt" else os.path.realpath(file))
    return _Program(argv, None if _SAFE_PATH else folder, partial(_run_file, file, source))


def _absolute(path: str) -> str:
    """``__file__`` as the interpreter makes it: joined, and not normalised but on Windows."""
    if os.name == "nt" or (path == "." and sys.version_info >= (3, 11)):
        return os.path.abspath(path)
    return os.path.join(os.getcwd(), path)


def _nearest(path: str) -> str:
    folder, name = os.path.split(path)
    scripts = [os.path.basename(found) for found in glob.glob(os.path.join(glob.escape(folder), "*.py"))]
    near = difflib.get_close_matches(name, scripts, n=1)
    if not near:
        return f"correct the path, it is taken from {os.getcwd()!r}"
    return f"did you mean {os.path.join(folder, near[0])!r}?"


def _run_file(file: str, source: bytes, scope: dict[str, Any]) -> None:
    loader: Any = (SourcelessFileLoader if file.endswith(".pyc") else SourceFileLoader)("__main__", file)
    scope.update(__file__=file, __cached__=None, __loader__=loader)
    if file.endswith(".pyc"):
        exec(loader.get_code("__main__"), scope)
    else:  # from bytes, so that a BOM or an encoding line counts; without the __future__ of this module
        exec(compile(source, file, "exec", dont_inherit=True), scope)


def _run_code(source: str, scope: dict[str, Any]) -> None:
    if sys.version_info >= (3, 13):  # from there on, tracebacks show the lines of -c
        linecache.cache["<string>"] = (len(source), None, source.splitlines(keepends=True), "<string>")
    exec(compile(source + "\n", "<string>", "exec", dont_inherit=True), scope)


def _run_module(name: str, alter_argv: bool, scope: dict[str, Any]) -> None:
    # The very function that the interpreter calls for -m, folders and zip files; it fills __main__. The
    # public ones put the old __main__ back at the program's end, before its threads and atexit are done.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _fresh_main() -> ModuleType:
    scope = vars(main := ModuleType("__main__"))
    scope["__loader__"] = BuiltinImporter
    if "__annotations__" in vars(sys.modules["__main__"]):  # a matter of the interpreter's version
        scope["__annotations__"] = {}
    scope["__builtins__"] = builtins  # exec would put the dictionary there, not the module
    return main


def _report(error: BaseException) -> None:
    """What the interpreter does with an exception nothing caught, frames of this module left out."""
    trace = error.__traceback__ = _without_us(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        print("sys.excepthook is missing", file=sys.stderr)
        hook = sys.__excepthook__
    failure: BaseException | None = None
    try:
        sys.audit("sys.excepthook", hook, type(error), error, trace)
        hook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as raised:
        failure = raised  # shown below: here it would count as being handled
    if failure is not None:
        failure.__traceback__ = _without_us(failure.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return trace
