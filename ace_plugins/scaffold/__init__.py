"""Creates a new adapter: an installable package with a small network, which passes its own tests unchanged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from string import Template

from .. import __version__
from ..errors import AceError

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".template"
"""Suffix of the files in ``templates``, so that tools do not treat them as Python code of ace-plugins."""


def make_adapter(name: str, into: Path, taken: dict[str, str]) -> tuple[Path, list[str]]:
    """Write the package ``ace-NAME`` into a folder. After an error, none of its files remain.

    Args:
        name: Name of the adapter.
        into: Existing parent folder.
        taken: Mapping from each name that is not available to the reason.

    Returns:
        The folder of the package, and the paths of its files relative to that folder.

    Raises:
        AceError: The name is invalid or taken, or the package exists or cannot be written.
    """
    _check_name(name, taken)
    entry, (major, minor) = name.replace("-", "_"), __version__.split(".")[:2]
    words = {
        "name": entry,
        "title": name,
        "distribution": f"ace-{name.replace('_', '-')}",
        "package": f"ace_{entry}",
        "host": f"ace-plugins>={major}.{minor},<{major}.{int(minor) + 1}",
    }
    folder = into / words["distribution"]
    try:
        folder.mkdir()
    except OSError as error:
        raise AceError(f"{folder} cannot be created: {error.strerror}; choose another name or folder") from error
    written = []
    try:
        for path in sorted(TEMPLATES.rglob(f"*{SUFFIX}")):
            name_in_package = Template(path.relative_to(TEMPLATES).as_posix()).substitute(words).removesuffix(SUFFIX)
            target = folder / name_in_package
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(path.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(name_in_package)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise AceError(f"{folder} cannot be written: {error.strerror}; fix this and try again") from error
        raise
    return folder, written


def _check_name(name: str, taken: dict[str, str]) -> None:
    if not NAME.fullmatch(name):
        raise AceError(f"invalid name {name!r}: expected lower-case letters, digits and single dashes, as in 'my-net'")
    if name.startswith(("ace-", "ace_")):
        raise AceError(f"{name!r}: the package gets the prefix 'ace-' anyway; did you mean {name[4:]!r}?")
    clash = taken.get(name.replace("-", "_")) or taken.get(name)
    if clash:
        raise AceError(f"{name!r} is taken: {clash}; choose another name")
