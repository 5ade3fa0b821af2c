"""Start a run: by ``ace-patch run``, or by the import line in a patched script.

``ace-patch run`` checks the settings and then replaces itself by the command (exec), so that the script has the same
arguments, tracebacks, exit code and signals as without ACE. The command's Python processes import
``startup/sitecustomize.py`` at start-up.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..contract.upstreams import Shim
from ..errors import AceError
from ..output import say
from ..plugins.claims import find_root
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.sources import find_misspelt
from ..settings.toml_file import NAME, SettingsFile, read
from .activation import VARIABLE, Activation, RunRequest, exit_with, inherit

STARTUP = str(Path(__file__).parent / "startup")
_INTERPRETER = re.compile(r"python[\d.]*t?")
_EXPECTED = "expected script.py, -m module, -c code or a command"


def launch(adapter: str, options: Mapping[str, Any], words: Sequence[str], *, as_json: bool) -> NoReturn:
    """Replace this process by a command that trains its models with ACE (``ace-patch run``)."""
    if os.name == "nt":
        raise AceError("'ace-patch run' does not work on Windows: call attach(model) in the script")
    plugin = registry().adapter(adapter)
    if words and _INTERPRETER.fullmatch(os.path.basename(words[0])):
        words = words[1:]  # "python", as in a command from a README; this interpreter is used instead
    command = _find_command(words)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise AceError("Python was started with -I, -E or -S, so it cannot load ACE: leave that option out")
    os.environ.pop(VARIABLE, None)  # set if this process is itself part of a run
    root = find_checkout(plugin, words)
    file = read(root / NAME) if root and (root / NAME).is_file() else None
    request = make_request(plugin, file if file and file.adapter == plugin.name else None, root, options)
    request.as_json, request.by_command = as_json, True
    environment = dict(os.environ)
    request.write_to(environment)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *(each for each in folders if each not in ("", STARTUP))])
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; other programs rely on them
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(command[0], command, environment)


def activate() -> None:
    """Start a run in a patched script, with the settings in ``ace.toml``. The script's import line calls this."""
    if Activation.current is not None:
        return  # 'ace-patch run' of a patched script: the command's settings apply
    importer = sys._getframe(2)
    while importer.f_code.co_filename.startswith("<frozen importlib") and importer.f_back is not None:
        importer = importer.f_back
    name = str(importer.f_globals.get("__name__"))
    request = RunRequest.from_environment()
    # A multiprocessing child imports its parent's script again. Any other process starts a new run.
    if request is not None and (request.by_command or name == "__mp_main__"):
        inherit()
        return
    os.environ.pop(VARIABLE, None)
    try:
        file = _find_settings(importer.f_code.co_filename)
        if file.adapter not in registry().plugins:
            do = "install it or run 'ace-patch revert'; 'ace-patch list' shows the installed adapters"
            raise AceError(f"{file.where('adapter')}: adapter {file.adapter!r} is not installed: {do}")
        request = make_request(registry().adapter(file.adapter), file, file.path.parent)
    except AceError as error:
        exit_with(error, name)
    request.choose_marker()
    Activation(request, name)


def make_request(
    plugin: Plugin, file: SettingsFile | None, root: Path | None, options: Mapping[str, Any] | None = None
) -> RunRequest:
    """Resolve and check the settings of a run that starts in this process."""
    models = plugin.patches.models
    if not models:
        raise AceError(
            f"'ace-patch run' cannot find your model, because adapter {plugin.name!r} lists no model classes; call "
            f"attach(model, adapter={plugin.name!r}) in the script, and run the script with python"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolved = plugin.resolve(file=file, environment=os.environ, options=options)
    notices = dict.fromkeys([*find_misspelt(os.environ), *(str(each.message) for each in caught)])
    for notice in notices if os.environ.get("RANK", "0") in ("", "0") else ():
        say(notice)
    shims_first = resolved.config.shims and any(isinstance(shim, Shim) and shim.first for shim in plugin.shims)
    return RunRequest(
        adapter=plugin.name,
        settings=dataclasses.asdict(resolved.config),
        origins=dict(resolved.origins),
        models=list(models),
        packages=sorted({path.partition(":")[0].partition(".")[0] for path in models}) if shims_first else [],
        cloned=plugin.patches.checkout is not None,
        root=None if root is None else str(root),
        process=os.getpid(),
    )


def find_checkout(plugin: Plugin, words: Sequence[str]) -> Path | None:
    """Return the checkout that contains the command's script, if any."""
    script = next((word for word in words if word.endswith(".py")), None)
    here = Path(script).resolve().parent if script else Path.cwd()
    found = find_root(str(here), plugin.patches.files) if plugin.patches.checkout else None
    return None if found is None else Path(found)


def _find_settings(script: str) -> SettingsFile:
    """Read the ``ace.toml`` in the script's folder or the nearest one above it."""
    for path in (Path(script).absolute(), Path(script).resolve()):
        for folder in path.parents:
            if (folder / NAME).is_file():
                return read(folder / NAME)
    raise AceError(
        f"{script} was patched by ace-patch, but there is no {NAME} in its folder or above: patch it again, or run "
        "'ace-patch revert' to remove the import line"
    )


def _find_command(words: Sequence[str]) -> list[str]:
    """Return the command line to execute: this Python interpreter followed by the words, or a program on PATH."""
    if not words or not words[0] or (len(words) == 1 and words[0] in ("-m", "-c")):
        raise AceError(f"no script given: {_EXPECTED}, as in ace-patch run ADAPTER -- script.py")
    first = words[0]
    if first.startswith("-") and first not in ("-m", "-c"):
        do = f"pass it to the interpreter, as in python {first} -m ace_plugins run ADAPTER -- script.py"
        raise AceError(f"{first!r} is an option, not a script: {_EXPECTED}; {do}")
    if first.endswith((".sh", ".bash")):
        raise AceError(f"{first!r} is a shell script: start its shell, as in ace-patch run ADAPTER -- bash {first}")
    if first in ("-m", "-c") or os.path.exists(first):
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return [sys.executable, *flags, *words]
    # Programs of this Python environment are preferred: those of another environment could not import ACE.
    beside = os.path.dirname(sys.executable)
    program = None if os.path.dirname(first) else shutil.which(first, path=beside) or shutil.which(first)
    if program is None:
        raise AceError(f"no script {first!r}: {_EXPECTED}; the current folder is {os.getcwd()!r}")
    return [program, *words[1:]]
