"""Run all fenced blocks of a page of the manual, from top to bottom, in an empty folder.

- ``sh`` blocks run in a shell. A ``cd`` also applies to the blocks that follow.
- ``python`` blocks run in one interpreter for the whole page.
- A block with ``title="path"`` is written to that file.
- A ``text`` block is expected output of the block before it: its lines must appear in that order. Other lines may
  appear in between, and "..." matches anything.
- ``<!-- not run: reason -->`` on the line before a block skips it.
- ``<!-- followed to the letter; needs: a, b -->`` at the top of a page selects it for these tests, and names the
  modules without which it is skipped. test_pages.py runs the Python blocks of all other pages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
COMMANDS = {"pip": "pip", "pytest": "pytest", "ace-patch": "ace_plugins"}
"""Commands in the reader's environment, and the modules that implement them."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    title: str
    """File that the block is written to; empty for a block that is run."""
    text: str
    skipped: str
    """Reason for not running the block; empty if it runs."""

    @property
    def place(self) -> str:
        return f"{self.page} line {self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        named = re.search(r'title="([^"]+)"', found[2])
        reason = NOT_RUN.search(before)
        yield Block(
            page.name,
            before.count("\n") + 1,
            found[1],
            named[1] if named else "",
            found[3],
            reason[1] if reason else "",
        )


def needs(page: Path) -> list[str] | None:
    """Return the modules that a page needs; None if the page is not run as a whole."""
    found = re.match(r"<!-- followed to the letter(?:; needs: (.+?))? -->", page.read_text(encoding="utf-8"))
    return None if found is None else re.split(r",\s*", found[1] or "")


def environment(folder: Path) -> dict[str, str]:
    """Create a virtual environment on top of the current one, and return the environment variables that select it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    here = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in dict.fromkeys(here)))
    for command, module in COMMANDS.items():
        (folder / "bin" / command).write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        (folder / "bin" / command).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACE_", "PYTEST_", "COV_"))}
    return {
        **kept,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
        # Everything is installed already, and tests do not use the network.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


INTERPRETER = """
import contextlib, io, json, sys, traceback
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    code, file, first, folder = json.loads(line)
    import os; os.chdir(folder)
    out, failure = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(compile("\\n" * first + code, file, "exec"), namespace)
        except BaseException:
            failure = traceback.format_exc()
    print(json.dumps([out.getvalue(), failure]), file=sys.__stdout__, flush=True)
"""


class Reader:
    """Runs the blocks of a page."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.last = ""
        """Output of the last block."""
        self._python: subprocess.Popen[str] | None = None

    def read(self, page: Path) -> None:
        try:
            for block in blocks(page):
                if not block.skipped:
                    self.follow(block)
        finally:
            if self._python is not None:
                self._python.communicate(timeout=60)

    def follow(self, block: Block) -> None:
        if block.title:
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.kind == "sh":
            self.shell(block)
        elif block.kind == "python":
            self.python(block)
        elif block.kind == "text":
            self.compare(block)
        else:
            pytest.fail(f"{block.place}: a block of {block.kind or 'nothing'} is not run: say why, or give it a title")

    def shell(self, block: Block) -> None:
        after = self.folder.parent / "folder-after"
        command = ["bash", "-euo", "pipefail", "-c", f"{block.text}\npwd > {str(after)!r}"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        self.last = done.stdout + done.stderr
        if done.returncode:
            pytest.fail(f"{block.place}: exit code {done.returncode}\n{block.text}\n{self.last}", pytrace=False)
        self.folder = Path(after.read_text().rstrip("\n"))

    def python(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                ["python", "-W", "ignore", "-c", INTERPRETER],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps([block.text, block.page, block.line, str(self.folder)]) + "\n")
        self._python.stdin.flush()
        answer = self._python.stdout.readline()
        self.last, failure = json.loads(answer) if answer else ("", "the interpreter ended")
        if failure:
            pytest.fail(f"{block.place}:\n{block.text}\n{failure}", pytrace=False)

    def compare(self, block: Block) -> None:
        printed = iter(self.last.splitlines())
        for line in block.text.splitlines():
            pattern = ".*".join(map(re.escape, line.strip().split("...")))
            if not any(re.search(pattern, each) for each in printed):
                pytest.fail(
                    f"{block.place}: the block before does not print, here,\n  {line}\nbut\n{self.last}", pytrace=False
                )
