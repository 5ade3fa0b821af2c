"""Patching a checkout in place, and undoing it.

One marked line goes into each entry script and an ``ace.toml`` beside them; there is no other state. Everything is
planned from what was read, and then written all or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.upstreams import Checkout
from ..errors import AceError, CheckoutError
from ..plugins.plugin import Plugin
from ..settings.config import Config
from ..settings.toml_file import NAME, SettingsFile, is_as_written, is_ours, read, update, write
from .layout import Layout, fits, layout
from .marking import Change, apply, content_of, diff, is_marked, mark, unmark


@dataclass(frozen=True)
class Plan:
    """What is to be changed in a checkout, and nothing changed yet."""

    root: Path
    changes: tuple[Change, ...]
    kept: tuple[str, ...] = ()
    """What stays although one might expect it to go, and why."""

    def diff(self) -> str:
        return diff(self.changes, self.root)

    def carry_out(self) -> None:
        apply(self.changes)

    @property
    def changed(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.before != change.after)

    def name(self, change: Change) -> str:
        return change.path.relative_to(self.root).as_posix()


@dataclass(frozen=True)
class Patching(Plan):
    """A plan that patches: what the folder was found to be, and the settings it gets."""

    layout: Layout = field(kw_only=True)
    settings: SettingsFile = field(kw_only=True)
    config: Config = field(kw_only=True)


def patching(root: Path, plugin: Plugin, settings: Mapping[str, Any]) -> Patching:
    """Plan to patch a checkout, or to set settings in one that is patched."""
    root = folder(root)
    checkout = checkout_of(plugin)
    for name in (NAME, *checkout.scripts):
        outside = leads_out(root, root / name)
        if outside is not None:
            raise CheckoutError(
                f"{name} is a link that leads out of {root}, to {str(outside)!r}: patching would change a file that is "
                "not the checkout's; put a copy in its place. Nothing was changed"
            )
    before = content_of(root / NAME)
    present = None if before is None else _read_own(root / NAME, before, plugin)
    presets = plugin.presets
    config = plugin.resolve(presets, file=present, options=settings).config
    if present is None:
        file = write(root / NAME, plugin.name, checkout.scripts[0], settings, presets)
    else:
        file = update(present, settings, checkout.scripts[0], presets)
    found = layout(root, checkout)
    if not found.fits:
        raise _refusal(root, plugin, checkout, found)
    # The settings first: a process killed half-way must not leave a marked script without them.
    changes = [Change(file.path, before, file.text.encode())]
    for script in checkout.scripts:
        source = (root / script).read_bytes()
        changes.append(Change(root / script, source, mark(source, script)))
    return Patching(root, tuple(changes), layout=found, settings=file, config=config)


def _read_own(path: Path, content: bytes, plugin: Plugin) -> SettingsFile:
    """Read the settings file of a checkout that is patched; refuse one of another adapter."""
    file = read(path, content)
    if file.adapter != plugin.name:
        raise CheckoutError(
            f"{path.parent} is patched for adapter {file.adapter!r} ({file.where('adapter')}), not {plugin.name!r}: "
            "one checkout has one adapter; run 'ace-patch revert' there first"
        )
    return file


def reverting(root: Path, *, purge: bool = False) -> Plan:
    """Plan to take the marked lines out, and ``ace.toml`` away unless somebody edited it."""
    root = folder(root)
    changes, kept = [], []
    for path in scripts_in(root):
        if leads_out(root, path) is not None:
            continue  # never ours to change
        source = content_of(path) or b""
        if b"ace_plugins" in source and is_marked(source):  # most files are not, and parsing them takes long
            changes.append(Change(path, source, unmark(source, path.relative_to(root).as_posix())))
    content = content_of(root / NAME)
    if content is not None:
        text = content.decode("utf-8-sig", "replace")
        outside = leads_out(root, root / NAME)
        if outside is not None:
            kept.append(f"{NAME}: it is a link that leads out of the checkout, to {str(outside)!r}")
        elif is_as_written(text) or (purge and is_ours(text)):
            changes.append(Change(root / NAME, content, None))
        elif is_ours(text):
            kept.append(f"{NAME}: it was edited; 'ace-patch revert --purge' removes it too")
        else:
            kept.append(f"{NAME}: it is not a file of ace-patch")
    if not changes and not kept:
        above = next((each for each in root.parents if (each / NAME).is_file()), None)
        if above is not None:
            raise CheckoutError(f"nothing to revert in {root}: did you mean {str(above)!r}?")
    return Plan(root, tuple(changes), tuple(kept))


def checkout_of(plugin: Plugin) -> Checkout:
    if plugin.upstream is None or plugin.upstream.checkout is None:
        raise AceError(
            f"'ace-patch {plugin.name}' does not exist: {plugin.name} has no checkout to patch; run 'ace-patch run "
            f"{plugin.name} -- your_script.py', or see 'ace-patch doctor {plugin.name}'"
        )
    return plugin.upstream.checkout


def leads_out(root: Path, path: Path) -> Path | None:
    """Where a link leads that leaves the checkout; None for everything else."""
    target = Path(os.path.realpath(path))
    return None if target.is_relative_to(os.path.realpath(root)) else target


def folder(root: Path) -> Path:
    """As the user wrote it, made absolute; links are left alone."""
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing there"
        raise CheckoutError(f"checkout {str(root)!r}: expected a folder, found {found}; give the folder of the clone")
    return root.absolute()


def _refusal(root: Path, plugin: Plugin, checkout: Checkout, found: Layout) -> CheckoutError:
    files = (*checkout.scripts, *checkout.shape)
    of = f"a checkout of {checkout.repository}, which adapter {plugin.name!r} patches"
    near = nearby(root, checkout)
    if near is not None:
        return CheckoutError(f"{root} is not {of}: did you mean {str(near)!r}?")
    if not any((root / file).is_file() for file in files):
        return CheckoutError(
            f"{root} is not {of}: expected {', '.join(files)}, found none of them; run it in the folder of the "
            "clone, or give its path"
        )
    return CheckoutError(
        f"{root} has not the shape of {of}; nothing was changed. Expected and not found as such", found.differences
    )


def nearby(root: Path, checkout: Checkout) -> Path | None:
    """A folder above or right below this one that is a checkout of that kind."""
    try:
        below = sorted(each for each in root.iterdir() if each.is_dir())
    except OSError:
        below = []
    return next((each for each in (*root.parents, *below) if fits(each, checkout)), None)


def scripts_in(root: Path) -> Iterator[Path]:
    """Every Python file of a checkout; not those of hidden folders, environments, or a checkout inside it."""
    for where, folders, files in os.walk(root):
        here = Path(where)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _is_apart(here / name))
        yield from (here / file for file in sorted(files) if file.endswith(".py") and (here / file).is_file())


def _is_apart(path: Path) -> bool:
    own = (NAME, ".git", "pyvenv.cfg", "conda-meta")
    return path.name == "site-packages" or any((path / each).exists() for each in own)
