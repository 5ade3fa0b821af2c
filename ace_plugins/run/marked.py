"""What happens at the marked line: the script trains with ACE, as its ``ace.toml`` says.

The line is the script's first import, so this must be light: the file is read now, and its settings are resolved when
the script is about to import upstream. That needs the adapter, and loading plugins takes longer than the line may.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import AceError
from ..later import later
from ..settings.file import NAME, SettingsFile, read
from .activation import Activation, current, give_up, inherit, inside
from .request import VARIABLE, RunRequest

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any


def activate(importer: FrameType) -> None:
    """Train the models of the script that imports this, as the ``ace.toml`` beside it says."""
    if current() is not None:
        return  # 'ace-patch run' of a marked script: as the command says
    name = str(importer.f_globals.get("__name__"))
    request = RunRequest.in_environment()
    # A process of multiprocessing imports its parent's script again. Any other started by a script is a run of its own.
    if request is not None and (request.by_command or name == "__mp_main__"):
        inherit()
        return
    os.environ.pop(VARIABLE, None)
    try:
        file = _settings_beside(importer.f_globals.get("__file__"))
    except AceError as error:
        give_up(error, name)
    root = str(file.path.parent)
    Activation(lambda: _request(file), inside(root), root, name)


def _request(file: SettingsFile) -> RunRequest:
    """The request for this run. Processes of multiprocessing that the script starts are handed the same."""
    request: RunRequest = later("ace_plugins.run.asking").asked(file.adapter, file=file, root=file.path.parent)
    request.hand_on(os.environ)
    return request


def _settings_beside(script: Any) -> SettingsFile:
    """The ``ace.toml`` of the folder the script is in, or of one above it."""
    if not isinstance(script, str):
        raise AceError(f"no script to activate ACE for: expected import ace_plugins.activate in a file beside {NAME}")
    starts = dict.fromkeys((Path(script).absolute().parent, Path(script).resolve().parent))
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / NAME).is_file():
                return read(folder / NAME)
    raise AceError(
        f"{script} was patched by ace-patch, but there is no {NAME} beside it: run 'ace-patch revert' in its folder to "
        "take the marked line out, or patch it again"
    )


def importing_frame() -> FrameType:
    """The frame of the import statement that brought in the caller's module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    assert frame is not None
    return frame
