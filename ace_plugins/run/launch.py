"""``ace-patch run``: checks what can be checked, and replaces itself by the command, with ACE in its environment.

The script runs in an interpreter of its own. Its arguments, tracebacks, exit code, signals and child processes are what
they are without ACE, since nothing imitates them. See ``startup/sitecustomize.py`` for the other end.
"""

from __future__ import annotations

import difflib
import glob
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import AceError
from ..plugins.claims import holding
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.file import NAME, read
from .asking import asked
from .request import VARIABLE

STARTUP = str(Path(__file__).parent / "startup")
_INTERPRETER = re.compile(r"pythonw?[\d.]*t?(\.exe)?", re.IGNORECASE)
_EXPECTED = "expected script.py, -m module, -c code or a command"
_RUNNABLE = "a Python file, a folder or zip file with __main__.py, or a command"


class ScriptError(AceError):
    """A script that cannot be started: none given, missing, unreadable, or a folder without a main."""


def launch(adapter: str, options: Mapping[str, Any], words: Sequence[str], *, as_json: bool) -> NoReturn:
    """Become the command that the words name, with every model of the adapter attached."""
    plugin = registry().adapter(adapter)
    words = _without_interpreter(words)
    command = _command(words)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ScriptError("Python was started with -I, -E or -S, which keeps ACE out of the script: leave that out")
    os.environ.pop(VARIABLE, None)  # of a run that this one was started in
    root = _root(plugin, words)
    file = read(root / NAME) if root and (root / NAME).is_file() else None
    if file is not None and file.adapter != plugin.name:
        file = None
    request = asked(plugin.name, file=file, options=options, root=root, as_json=as_json, by_command=True)
    environment = dict(os.environ)
    request.hand_on(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *(each for each in folders if each not in ("", STARTUP))])
    _become(command, environment)


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    if os.name == "nt":  # which has no exec that keeps the console and the exit code
        sys.exit(subprocess.call(command, env=environment))
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores; the command may be none of Python's
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(command[0], command, environment)


def _without_interpreter(words: Sequence[str]) -> list[str]:
    """The words of a whole command, pasted from a README. Its interpreter is this one."""
    if words and _is_interpreter(words[0]) and (len(words) > 1 or not os.path.exists(words[0])):
        words = words[1:]
    return list(words)


def _is_interpreter(word: str) -> bool:
    # The bare word is the interpreter even next to a folder of that name; a path may be the folder.
    folder, name = os.path.split(word)
    named = _INTERPRETER.fullmatch(name) and not (folder and os.path.isdir(word))
    return bool(named) or word == sys.executable


def _command(words: list[str]) -> list[str]:
    """What to execute for these words: this interpreter with them, or a program that is found on PATH."""
    if not words or not words[0]:
        raise ScriptError(f"no script given: {_EXPECTED}; add it, as in ace-patch run ADAPTER -- script.py")
    first = words[0]
    if first in ("-m", "-c") and len(words) == 1:
        raise ScriptError(f"nothing after {first}: {_EXPECTED}; add what to run")
    if first == "-":
        raise ScriptError(f"'-' (standard input) cannot be run: {_EXPECTED}; save the code to a file")
    if first.startswith("-") and first not in ("-m", "-c"):
        do = f"give it to the interpreter, as in python {first} -m ace_plugins run ADAPTER -- script.py"
        raise ScriptError(f"{first!r} is an option, not a script: {_EXPECTED}; {do}")
    if first not in ("-m", "-c") and not os.path.exists(first):
        program = None if os.path.dirname(first) else shutil.which(first)
        if program is None:
            raise ScriptError(f"no script {first!r}: expected {_RUNNABLE}; {_nearest(first)}")
        return [program, *words[1:]]
    if first not in ("-m", "-c"):
        _check_script(first)
    return [sys.executable, *_flags(), *words]


def _flags() -> list[str]:
    """The options that this interpreter was started with."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # It leaves out -u, which shows in the streams.
    return [*flags, "-u"] if getattr(sys.stdout, "write_through", False) else flags


def _check_script(path: str) -> None:
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:  # a folder or a zip file: the interpreter runs the __main__ in it
        spec = importer.find_spec("__main__")
        if spec is None or spec.loader is None:
            near = _nearest(os.path.join(path, "__main__.py"))
            raise ScriptError(f"no __main__.py in {path!r}: expected {_RUNNABLE}; {near}")
    elif not os.access(path, os.R_OK):
        raise ScriptError(f"cannot read script {path!r}: expected {_RUNNABLE}; check its permissions")


def _nearest(path: str) -> str:
    folder, name = os.path.split(path)
    scripts = [os.path.basename(found) for found in glob.glob(os.path.join(glob.escape(folder), "*.py"))]
    near = difflib.get_close_matches(name, scripts, n=1)
    if not near:
        return f"correct the path, it is taken from {os.getcwd()!r}"
    return f"did you mean {os.path.join(folder, near[0])!r}?"


def _root(plugin: Plugin, words: Sequence[str]) -> Path | None:
    """The checkout that the script is in, if it is in one."""
    if plugin.patches.checkout is None:
        return None
    script = next((word for word in words if word.endswith(".py")), None)
    here = Path(script).resolve().parent if script else Path.cwd()
    found = holding(str(here), plugin.patches.files)
    return None if found is None else Path(found)
