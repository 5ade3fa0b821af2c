"""Write a new adapter: an installable package with a stand-in network, which passes its own tests as it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from .. import __version__
from ..errors import AceError

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
SUFFIX = ".template"
"""Of the files below ``templates``, so that nobody takes them for code of the host."""


def make_adapter(name: str, into: Path, taken: dict[str, str]) -> tuple[Path, list[str]]:
    """Write the package ``ace-NAME`` below a folder. Returns its folder, and its files from there.

    ``taken`` are names that an adapter cannot have, and why.
    """
    check_name(name, taken)
    words = _words(name)
    folder = into / words["distribution"]
    if not into.is_dir():
        raise AceError(f"no folder {str(into)!r} to put {folder.name} into: expected one that exists")
    try:
        folder.mkdir()
    except FileExistsError:
        raise AceError(f"{folder} exists, and nothing of it was touched: remove it, or choose another name") from None
    except OSError as error:
        raise AceError(f"{folder} cannot be made: {error.strerror}") from error
    written = []
    try:
        for path, text in _templates():
            target = folder / Template(path).substitute(words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(text).substitute(words), encoding="utf-8")
            written.append(target.relative_to(folder).as_posix())
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # all of it or nothing
        if isinstance(error, OSError):
            raise AceError(f"{folder} cannot be written: {error.strerror}") from error
        raise
    return folder, written


def check_name(name: str, taken: dict[str, str]) -> None:
    """Names become those of a distribution, a package, an entry point and a word of the command line."""
    if not NAME.fullmatch(name):
        raise AceError(
            f"{name!r} is no name for an adapter: expected small letters, digits and single dashes, beginning with a "
            "letter, as 'my-net'"
        )
    if name.startswith(("ace-", "ace_")):
        raise AceError(f"{name!r}: the package is called ace-NAME anyway; did you mean {name[4:]!r}?")
    clash = taken.get(name.replace("-", "_")) or taken.get(name)
    if clash:
        raise AceError(f"{name!r} is taken: {clash}; choose another name")


def _words(name: str) -> dict[str, str]:
    """What the templates know."""
    entry = name.replace("-", "_")
    major, minor = __version__.split(".")[:2]
    return {
        "name": entry,
        "title": name,
        "distribution": f"ace-{name.replace('_', '-')}",
        "package": f"ace_{entry}",
        "host": f"ace-plugins>={major}.{minor},<{major}.{int(minor) + 1}",
    }


def _templates() -> Iterator[tuple[str, str]]:
    """Path in the new package, and text. ``$package`` in a path is one of the words, too."""
    root = Path(str(files(__package__))) / "templates"
    for path in sorted(root.rglob(f"*{SUFFIX}")):
        yield path.relative_to(root).as_posix().removesuffix(SUFFIX), path.read_text(encoding="utf-8")
