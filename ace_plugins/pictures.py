"""Pictures that commands are asked to draw: everything that can be wrong is said before the work, not after it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import ConfigError

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
