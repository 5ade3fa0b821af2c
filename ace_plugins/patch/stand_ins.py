"""Modules that stand in for ones that are not installed, for the files of one upstream and for nobody else.

Libraries probe for optional packages and behave differently where they find one: PyTorch Geometric asks for
torch_scatter, trainers ask for wandb. So a stand-in answers only imports written in upstream's own files, and only
after every other finder had nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec

from ..plugins.claims import belongs

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType
    from typing import Any

    from ..contract.upstreams import StandIn


class StandIns:
    """The last finder of all."""

    def __init__(self) -> None:
        self.offered: dict[str, list[tuple[StandIn, tuple[str, ...]]]] = {}
        """Per module what stands in for it, and the files that tell its upstream; several upstreams may miss one."""
        self.active: dict[str, StandIn] = {}
        """What stands in for something now."""
        self.asked: Callable[[str, str], None] | None = None
        """Told of every module that nobody found, with the file that imports it, before the answer."""

    def offer(self, stand_in: StandIn, files: tuple[str, ...]) -> None:
        """From now on, in upstreams that hold these files."""
        self.withdraw(stand_in)
        self.offered.setdefault(stand_in.name, []).append((stand_in, files))
        self.install()

    def withdraw(self, stand_in: StandIn) -> None:
        """What was made stays: upstream has it."""
        others = [each for each in self.offered.pop(stand_in.name, []) if each[0].reason != stand_in.reason]
        if others:
            self.offered[stand_in.name] = others

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer, line = _import_statement()
        if self.asked is not None:
            self.asked(name, importer)
        for stand_in, files in self.offered.get(name, ()):
            if belongs(importer, files) and not is_a_question(importer, line):
                loader: Any = _Maker(stand_in, self)
                return ModuleSpec(name, loader, origin=f"stand-in of ace-plugins for {name}")
        return None


class _Maker:
    def __init__(self, stand_in: StandIn, owner: StandIns) -> None:
        self.stand_in = stand_in
        self.owner = owner

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self.stand_in.make()
        self.owner.active[self.stand_in.name] = self.stand_in
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # it was made whole


def _import_statement() -> tuple[str, int]:
    """The file and line of the import statement that is being carried out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__")).startswith("ace_plugins.")
        # What is in no file ("<string>", "<frozen importlib._bootstrap>") was executed by one.
        if not ours and not file.startswith("<") and os.path.basename(os.path.dirname(file)) != "importlib":
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def is_a_question(file: str, line: int) -> bool:
    """Whether this import may fail: it stands in a ``try`` that catches the failure. Then no is the right answer."""
    import ast

    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    return any(
        each.body[0].lineno <= line <= (each.body[-1].end_lineno or line) and any(map(_catches_it, each.handlers))
        for each in tries
    )


def _catches_it(handler: ast.ExceptHandler) -> bool:
    import ast

    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


STAND_INS = StandIns()
