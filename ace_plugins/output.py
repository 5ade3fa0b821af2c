"""Telling people what happens, on stderr: stdout is the script's.

Write a file whole or not at all.

Pictures that commands are asked to draw: everything that can be wrong is said before the work, not after it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import AceError, ConfigError


def say(text: str, *, anyway: bool = False) -> None:
    """Print one line. Where ACE_QUIET asks for quiet, only what is to be told ``anyway``, which errors are."""
    if sys.stderr is not None and (anyway or not quiet()):
        print(f"ace: {text}", file=sys.stderr)


def quiet() -> bool:
    """Whether the user asked for quiet."""
    return os.environ.get("ACE_QUIET", "").strip().lower() not in ("", "0", "false", "no", "off")


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """A bar for what takes a while: what to call with every few that are done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    import click  # here: every process of a run waits for this module

    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update


ABANDONED = 60.0
"""Seconds after which a part of a file is nobody's: its process was killed."""
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def publish(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], None]) -> None:
    """Put ``content`` into a file, or what ``content`` writes when it is called with the open file.

    The file changes at once, when all of it is on the disk. It keeps its mode, and its owner where that is
    permitted. Of a link, the file it points to changes.
    """
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.part")  # long names have no room for more
    sweep(target)
    try:
        like = target.stat() if target.exists() else None
        try:
            # For nobody else, until it has the mode of the file it replaces.
            private = None if like is None else lambda name, flags: os.open(name, flags, 0o600)
            with open(fresh, "xb", opener=private) as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if like is not None:
                with contextlib.suppress(OSError, AttributeError):  # not everyone may, not every system can
                    os.chown(fresh, like.st_uid, like.st_gid)
                os.chmod(fresh, stat.S_IMODE(like.st_mode))  # last: a change of owner clears some bits
            os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        do = "make it writable or work on a copy" if error.errno in FORBIDDEN else "mend that and try again"
        raise AceError(f"{path} cannot be written, {error.strerror or error}; {do}") from error


def sweep(target: Path) -> None:
    """Remove the parts of this file that killed processes have left beside it."""
    part = re.compile(rf"\.{re.escape(target.name[:40])}\.[0-9a-f]{{8}}\.part")
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            if part.fullmatch(path.name) and time.time() - path.lstat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)


FORMATS = (".png", ".pdf", ".svg")


def check_picture(path: Path, install: str = "run pip install 'ace-plugins[picture]'") -> None:
    """Whether a picture can be drawn there, as far as that shows without drawing it.

    ``install`` is what to do where matplotlib is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"picture {str(path)!r}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"picture {str(path)!r}: expected an existing folder, found no {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"picture {str(path)!r}: expected the package matplotlib, found none; {install}")
