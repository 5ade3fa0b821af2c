"""Deprecated module: groups and actions are now in `ace_plugins.adapter`."""

from ._moved import find_moved


def __getattr__(name: str) -> object:
    return find_moved(name, __name__)
