"""Output of commands and runs: messages and progress on stderr, atomic writes of files, checks of picture files."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import platform
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import AceError, ConfigError

# C0 and C1, marks that change the direction of text, and surrogates (bytes of file names that are not UTF-8).
_CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# Identifies this machine in names of unfinished files, since other machines may share the folder.
_MACHINE = f"{zlib.crc32(platform.node().encode()) & 0xFFFF:04x}"
_PART = re.compile(rf"\..{{1,40}}\.([0-9]{{1,9}})\.{_MACHINE}[0-9a-f]{{4}}\.part", re.DOTALL)


def say(text: str, *, anyway: bool = False) -> None:
    """Print one line with the prefix ``ace:`` on stderr, because stdout is for the output of the user's script.

    Args:
        text: The message.
        anyway: Whether to print even if ``ACE_QUIET`` is set, for example an error.
    """
    if sys.stderr is not None and (anyway or not quiet()):
        print(f"ace: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape control characters, which could rewrite the terminal's content, except tabs and ends of lines.

    Args:
        text: Text that may come from another person's file, such as a name in the record of a run.

    Returns:
        The text with escapes such as ``\\x1b`` in place of these characters.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def quiet() -> bool:
    """Return whether the environment variable ``ACE_QUIET`` is set, to a value other than 0, false, no or off."""
    return os.environ.get("ACE_QUIET", "").strip().lower() not in ("", "0", "false", "no", "off")


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar on stderr while the block runs.

    Args:
        length: Number of items.
        label: Text before the bar.

    Yields:
        A function to call with the number of items just finished; None if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    import click  # not at the top: every process of a run imports this module

    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update


def publish(
    path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], None], *, follow_link: bool = False
) -> None:
    """Write a file atomically: readers see the old file or the complete new one.

    The file keeps its mode, and its owner where that is permitted.

    Args:
        path: The file.
        content: The bytes to write, or a function that writes to the open file.
        follow_link: Whether to change the target if the path is a link. Otherwise the file replaces the link.

    Raises:
        AceError: The file cannot be written.
    """
    target = Path(os.path.realpath(path) if follow_link else os.path.abspath(path))
    # A name within the limit of file names. `sweep` reads the process id.
    fresh = target.with_name(f".{target.name[:40]}.{os.getpid()}.{_MACHINE}{os.urandom(2).hex()}.part")
    try:
        like = target.stat() if target.exists() and not target.is_symlink() else None
        try:
            # Nobody else may read the new file until it gets the mode of the file that it replaces.
            private = None if like is None else lambda name, flags: os.open(name, flags, 0o600)
            with open(fresh, "xb", opener=private) as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if like is not None:
                with contextlib.suppress(OSError, AttributeError):  # not permitted, or not available on this system
                    os.chown(fresh, like.st_uid, like.st_gid)
                os.chmod(fresh, stat.S_IMODE(like.st_mode))  # last, because chown clears some bits
            os.replace(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)
            sweep(target.parent)
    except OSError as error:
        forbidden = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        do = "make it writable or work on a copy" if forbidden else "fix this and try again"
        raise AceError(f"{path} cannot be written: {error.strerror or error}; {do}") from error


def sweep(folder: Path) -> None:
    """Remove the unfinished files that killed processes of this machine have left in a folder, see `publish`."""
    for path in folder.glob(".*.part") if os.name != "nt" else ():  # Windows has no signal 0
        if found := _PART.fullmatch(path.name):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's process, or swept already
                try:
                    os.kill(int(found[1]), 0)
                except ProcessLookupError:
                    path.unlink()


def check_picture(path: Path, install: str = "run pip install matplotlib") -> None:
    """Check that a picture can be drawn. Call this before a long computation, not after it.

    Args:
        path: File of the picture: .png, .pdf or .svg.
        install: Advice for the error message if matplotlib is missing.

    Raises:
        ConfigError: The name has another ending, the folder does not exist, or matplotlib is missing.
    """
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"picture {str(path)!r}: expected a name that ends in .png, .pdf or .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"picture {str(path)!r}: folder {path.absolute().parent} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"picture {str(path)!r}: matplotlib is not installed; {install}")
