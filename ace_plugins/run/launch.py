"""``ace-patch run``: checks what can be checked, and replaces itself by the command, with ACE in its environment.

The script runs in an interpreter of its own. Its arguments, tracebacks, exit code, signals and child processes are what
they are without ACE, since nothing imitates them. See ``startup/sitecustomize.py`` for the other end.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..contract.upstreams import Shim
from ..errors import AceError
from ..output import say
from ..plugins.claims import holding
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.sources import misspelt, origins, resolve
from ..settings.toml_file import NAME, SettingsFile, read
from .request import VARIABLE, RunRequest

STARTUP = str(Path(__file__).parent / "startup")
_INTERPRETER = re.compile(r"python[\d.]*t?")
_EXPECTED = "expected script.py, -m module, -c code or a command"


def launch(adapter: str, options: Mapping[str, Any], words: Sequence[str], *, as_json: bool) -> NoReturn:
    """Become the command that the words name, with every model of the adapter attached."""
    if os.name == "nt":
        raise AceError("'ace-patch run' is not for Windows, which cannot replace a process: call attach(model)")
    plugin = registry().adapter(adapter)
    if words and _INTERPRETER.fullmatch(os.path.basename(words[0])):
        words = words[1:]  # of a command that was pasted from a README: its interpreter is this one
    command = _command(words)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise AceError("Python was started with -I, -E or -S, which keeps ACE out of the script: leave that out")
    os.environ.pop(VARIABLE, None)  # of a run that this one was started in
    root = find_checkout(plugin, words)
    file = read(root / NAME) if root and (root / NAME).is_file() else None
    if file is not None and file.adapter != plugin.name:
        file = None
    request = asked(plugin, file, options=options, root=root, as_json=as_json, by_command=True)
    environment = dict(os.environ)
    request.hand_on(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *(each for each in folders if each not in ("", STARTUP))])
    _become(command, environment)


def asked(
    plugin: Plugin,
    file: SettingsFile | None,
    *,
    root: Path | None,
    options: Mapping[str, Any] | None = None,
    as_json: bool = False,
    by_command: bool = False,
) -> RunRequest:
    """The request for a run whose first process is this one, with all settings resolved and checked.

    Options go before the environment, and that before the file.
    """
    if not plugin.patches.models:
        raise AceError(
            f"adapter {plugin.name!r} names no class that a run could attach to: call attach(model, "
            f"adapter={plugin.name!r}) in the script, and start it without 'ace-patch run'"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = plugin.checked(resolve(plugin.presets, file=file, options=options))
        origin = origins(plugin.presets, file=file, options=options)
    if os.environ.get("RANK", "0") in ("", "0"):  # of many processes one
        for notice in dict.fromkeys([*misspelt(os.environ), *(str(each.message) for each in caught)]):
            say(notice)
    return RunRequest(
        adapter=plugin.name,
        settings=dataclasses.asdict(config),
        origins=origin,
        models=list(plugin.patches.models),
        begins=_begins(plugin) if config.shims else [],
        cloned=plugin.patches.checkout is not None,
        root=None if root is None else str(root),
        as_json=as_json,
        by_command=by_command,
        process=os.getpid(),
        marker=os.path.join(tempfile.gettempdir(), f"ace-{os.getpid()}-{os.urandom(8).hex()}"),
        attended=not by_command,
    )


def _begins(plugin: Plugin) -> list[str]:
    """The packages of upstream's models, where they cannot be imported without a repair."""
    if not any(isinstance(shim, Shim) and shim.first for shim in plugin.shims):
        return []
    return sorted({path.partition(":")[0].partition(".")[0] for path in plugin.patches.models})


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; the command may be none of Python's
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(command[0], command, environment)


def _command(words: Sequence[str]) -> list[str]:
    """What to execute for these words: this interpreter with them, or a program that is found on PATH."""
    if not words or not words[0] or (len(words) == 1 and words[0] in ("-m", "-c")):
        raise AceError(f"no script given: {_EXPECTED}; add it, as in ace-patch run ADAPTER -- script.py")
    first = words[0]
    if first.startswith("-") and first not in ("-m", "-c"):
        do = f"give it to the interpreter, as in python {first} -m ace_plugins run ADAPTER -- script.py"
        raise AceError(f"{first!r} is an option, not a script: {_EXPECTED}; {do}")
    if first in ("-m", "-c") or os.path.exists(first):
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        if getattr(sys.stdout, "write_through", False):  # -u, which it leaves out
            flags = [*flags, "-u"]
        return [sys.executable, *flags, *words]
    # Commands that are installed beside this interpreter go first: those of another one would not know ACE.
    beside = os.path.dirname(sys.executable)
    program = None if os.path.dirname(first) else shutil.which(first, path=beside) or shutil.which(first)
    if program is None:
        folder, name = os.path.split(first)
        near = difflib.get_close_matches(name, [path.name for path in Path(folder).glob("*.py")], n=1)
        hint = f"did you mean {os.path.join(folder, near[0])!r}?" if near else f"it is looked for in {os.getcwd()!r}"
        raise AceError(f"no script {first!r}: {_EXPECTED}; {hint}")
    return [program, *words[1:]]


def find_checkout(plugin: Plugin, words: Sequence[str]) -> Path | None:
    """Return the checkout that contains the command's script, if any."""
    script = next((word for word in words if word.endswith(".py")), None)
    here = Path(script).resolve().parent if script else Path.cwd()
    found = holding(str(here), plugin.patches.files) if plugin.patches.checkout else None
    return None if found is None else Path(found)
