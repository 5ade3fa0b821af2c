"""What happens at the marked line: the script trains with ACE, as its ``ace.toml`` says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from ..errors import AceError
from ..plugins.registry import registry
from ..settings.toml_file import NAME, SettingsFile, read
from .activation import Activation, give_up, inherit
from .launch import asked
from .request import VARIABLE, RunRequest


def activate(importer: FrameType) -> None:
    """Train the models of the script that imports this, as the ``ace.toml`` beside it says."""
    if Activation.current is not None:
        return  # 'ace-patch run' of a marked script: as the command says
    name = str(importer.f_globals.get("__name__"))
    request = RunRequest.in_environment()
    # A process of multiprocessing imports its parent's script again. Any other started by a script is a run of its own.
    if request is not None and (request.by_command or name == "__mp_main__"):
        inherit()
        return
    os.environ.pop(VARIABLE, None)
    try:
        file = _settings_beside(importer.f_code.co_filename)
        if file.adapter not in registry().plugins:
            raise AceError(
                f"adapter {file.adapter!r}, which {file.where('adapter')} names, is not installed in this environment: "
                "install it, or run 'ace-patch revert'; 'ace-patch list' shows what there is"
            )
        request = asked(registry().adapter(file.adapter), file, root=file.path.parent)
    except AceError as error:
        give_up(error, name)
    request.hand_on(os.environ)  # to processes of multiprocessing that the script starts
    Activation(request, name)


def _settings_beside(script: str) -> SettingsFile:
    """The ``ace.toml`` of the folder the script is in, or of one above it."""
    for path in (Path(script).absolute(), Path(script).resolve()):
        for folder in path.parents:
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
