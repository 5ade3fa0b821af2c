"""Stubs for modules that are not installed, visible to the files of one upstream only.

Libraries probe for optional packages and change their behaviour if they find one: PyTorch Geometric looks for
torch_scatter, trainers for wandb. So a stub is found only by import statements in upstream's own files, and only after
all other finders have failed.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec

from ..plugins.claims import belongs

TYPE_CHECKING = False  # importing typing would slow down every script that is patched
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType
    from typing import Any

    from ..contract.upstreams import StandIn


class StandIns:
    """Import finder and loader of stubs for missing modules. It is at the end of ``sys.meta_path``."""

    def __init__(self) -> None:
        self.offered: dict[str, list[tuple[StandIn, tuple[str, ...]]]] = {}
        """Mapping from a module's name to its stubs, one per upstream, each with files that identify the upstream."""
        self.active: dict[str, StandIn] = {}
        """Mapping from the name of each stub that was imported to the stub."""
        self.on_missing: Callable[[str, str], None] | None = None
        """Function to call with the name of each module that no other finder has found, and the importing file."""

    def offer(self, stand_in: StandIn, files: tuple[str, ...]) -> None:
        """Make a stub importable from upstreams that have these files."""
        self.withdraw(stand_in)
        self.offered.setdefault(stand_in.name, []).append((stand_in, files))
        self.install()

    def withdraw(self, stand_in: StandIn) -> None:
        """Make a stub unavailable for new imports."""
        others = [each for each in self.offered.pop(stand_in.name, []) if each[0].reason != stand_in.reason]
        if others:
            self.offered[stand_in.name] = others
        if not self.offered and self.on_missing is None and self in sys.meta_path:
            sys.meta_path.remove(self)

    def install(self) -> None:
        """Install the finder."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer, line = _find_import_statement()
        if self.on_missing is not None:
            self.on_missing(name, importer)
        for stand_in, files in self.offered.get(name, ()):
            if belongs(importer, files) and not is_optional(importer, line):
                loader: Any = self
                return ModuleSpec(name, loader, origin=f"stub of ace-plugins for {name}", loader_state=stand_in)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stand_in: StandIn = spec.loader_state
        module = stand_in.make()
        self.active[spec.name] = stand_in
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # create_module has already filled the module


def _find_import_statement() -> tuple[str, int]:
    """Return the file and line of the import statement that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__")).startswith("ace_plugins.")
        # Skip code that is in no file ("<string>", "<frozen importlib._bootstrap>"): code in a file has called it.
        if not ours and not file.startswith("<") and os.path.basename(os.path.dirname(file)) != "importlib":
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def is_optional(file: str, line: int) -> bool:
    """Return whether an import is in a ``try`` that catches an ImportError. Such an import gets no stub."""
    import ast  # slow to import, and every patched script imports this module

    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    caught = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line):
            for handler in node.handlers:
                types = ast.walk(handler.type) if handler.type else ()
                if handler.type is None or caught & {each.id for each in types if isinstance(each, ast.Name)}:
                    return True
    return False


STAND_INS = StandIns()
