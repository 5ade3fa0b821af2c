"""Deprecated module: groups and actions are now in `ace_plugins.adapter`."""

from . import _find_moved


def __getattr__(name: str) -> object:
    return _find_moved(name, __name__)
