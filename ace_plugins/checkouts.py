"""Patching a checkout in place, undoing it, and telling how it is.

One marked line goes into each entry script and an ``ace.toml`` beside them; there is no other state. Everything is
planned from what was read, and then written all or not at all.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import Config, build
from .contract import Checkout
from .errors import AceError, CheckoutError
from .fingerprint import Fingerprint, fingerprint
from .marking import activates, is_marked, mark, unmark
from .plugins import Plugin, Registry
from .settings_file import NAME, SettingsFile, checked, is_as_written, load, new
from .writing import Change, apply, diff


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

    print: Fingerprint = field(kw_only=True)
    settings: SettingsFile = field(kw_only=True)
    config: Config = field(kw_only=True)


def patching(root: Path, plugin: Plugin, settings: Mapping[str, Any]) -> Patching:
    """Plan to patch a checkout, or to set settings in one that is patched."""
    root = folder(root)
    checkout = checkout_of(plugin)
    presets = plugin.call("ace_preset") if plugin.has("ace_preset") else {}
    config = build(settings, presets)
    file, before = _settings(root, plugin, settings, presets)
    if file.settings != settings:
        config = checked(file.settings, presets, file.where)
    found = fingerprint(root, checkout)
    if not found.fits:
        raise _refusal(root, plugin, checkout, found)
    changes = []
    for script in checkout.scripts:
        source = (root / script).read_bytes()
        changes.append(Change(root / script, source, mark(source, script)))
    changes.append(Change(file.path, before, _encoded(file, before)))
    return Patching(root, tuple(changes), print=found, settings=file, config=config)


def _settings(
    root: Path, plugin: Plugin, settings: Mapping[str, Any], presets: Mapping[str, Any]
) -> tuple[SettingsFile, bytes | None]:
    path = root / NAME
    if not path.exists():
        return new(path, plugin.name, checkout_of(plugin).scripts[0], settings, presets), None
    file = load(path)
    if file.adapter != plugin.name:
        raise CheckoutError(
            f"{root} is patched for adapter {file.adapter!r} ({file.where('adapter')}), not {plugin.name!r}: one "
            "checkout has one adapter; run 'ace-patch revert' there first"
        )
    before = path.read_bytes()
    return file.with_settings(settings), before


def _encoded(file: SettingsFile, before: bytes | None) -> bytes:
    """The file's text with the line endings, and the mark at its start, that it had before."""
    before = before or b""
    text = file.text.replace("\n", "\r\n") if b"\r\n" in before else file.text
    return (codecs.BOM_UTF8 if before.startswith(codecs.BOM_UTF8) else b"") + text.encode()


def reverting(root: Path, *, purge: bool = False) -> Plan:
    """Plan to take the marked lines out, and ``ace.toml`` away unless somebody edited it."""
    root = folder(root)
    changes, kept = [], []
    for path in scripts_in(root):
        source = path.read_bytes()
        if is_marked(source):
            changes.append(Change(path, source, unmark(source, path.relative_to(root).as_posix())))
        for line in activates(source):
            name = path.relative_to(root).as_posix()
            kept.append(f"{name} line {line}: imports ace_plugins.activate without the mark of ace-patch")
    path = root / NAME
    if path.is_file():
        content = path.read_bytes()
        if purge or is_as_written(content.decode("utf-8", "replace")):
            changes.append(Change(path, content, None))
        else:
            kept.append(f"{NAME}: it was edited; 'ace-patch revert --purge' removes it too")
    return Plan(root, tuple(changes), tuple(kept))


@dataclass(frozen=True)
class State:
    """How a checkout is."""

    root: Path
    adapter: Plugin
    print: Fingerprint
    scripts: Mapping[str, str]
    """Per entry script: "patched" or "not patched", or why that cannot be told."""
    settings: SettingsFile | None
    config: Config | None
    runs: tuple[str, ...]

    @property
    def patched(self) -> bool:
        return self.settings is not None and set(self.scripts.values()) == {"patched"}

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkout": str(self.root),
            "adapter": self.adapter.name,
            "commit": self.print.commit,
            "known": self.print.known,
            "differences": list(self.print.differences),
            "patched": self.patched,
            "scripts": dict(self.scripts),
            "settings": None if self.settings is None else dict(self.settings.settings),
            "edited": None if self.settings is None else not self.settings.as_written,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "runs": list(self.runs),
        }


def state(root: Path, registry: Registry) -> State:
    """Whose checkout a folder is, whether it is patched, and with which settings."""
    root = folder(root)
    settings = load(root / NAME) if (root / NAME).is_file() else None
    plugin = registry.adapter(settings.adapter) if settings else _claiming(root, registry)
    checkout = checkout_of(plugin)
    config = None
    if settings is not None:
        presets = plugin.call("ace_preset") if plugin.has("ace_preset") else {}
        config = checked(settings.settings, presets, settings.where)
    runs = root / ".ace" / "runs"
    return State(
        root=root,
        adapter=plugin,
        print=fingerprint(root, checkout),
        scripts={script: _script_state(root / script) for script in checkout.scripts},
        settings=settings,
        config=config,
        runs=tuple(sorted(each.name for each in runs.iterdir() if each.is_dir())) if runs.is_dir() else (),
    )


def _script_state(path: Path) -> str:
    try:
        source = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "patched" if is_marked(source) or activates(source) else "not patched"


def _claiming(root: Path, registry: Registry) -> Plugin:
    """The adapter whose checkout this is, by its shape."""
    fitting = [p for p in _with_checkouts(registry) if fingerprint(root, checkout_of(p)).fits]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(f"{p.name} ({p.distribution})" for p in fitting)
        raise CheckoutError(f"several adapters claim {root}: {names}; say which, as 'ace-patch {fitting[0].name}'")
    known = ", ".join(f"{p.name} ({checkout_of(p).repository})" for p in _with_checkouts(registry)) or "none installed"
    raise CheckoutError(f"{root} is no checkout of an upstream that an adapter patches: expected one of {known}")


def _with_checkouts(registry: Registry) -> Sequence[Plugin]:
    return [p for p in registry.adapters if p.upstream is not None and p.upstream.checkout is not None]


def checkout_of(plugin: Plugin) -> Checkout:
    if plugin.upstream is None or plugin.upstream.checkout is None:
        raise AceError(
            f"'ace-patch {plugin.name}' does not exist: {plugin.name} has no checkout to patch; run 'ace-patch run "
            f"{plugin.name} -- your_script.py', or see 'ace-patch doctor {plugin.name}'"
        )
    return plugin.upstream.checkout


def folder(root: Path) -> Path:
    """As the user wrote it, made absolute; links are left alone."""
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing there"
        raise CheckoutError(f"checkout {str(root)!r}: expected a folder, found {found}; give the folder of the clone")
    return root.absolute()


def _refusal(root: Path, plugin: Plugin, checkout: Checkout, found: Fingerprint) -> CheckoutError:
    files = (*checkout.scripts, *checkout.shape)
    there = [file for file in files if (root / file).is_file()]
    of = f"a checkout of {checkout.repository}, which adapter {plugin.name!r} patches"
    if not there:
        near = [each for each in (*root.parents, *_subfolders(root)) if fingerprint(each, checkout).fits]
        hint = f"did you mean {str(near[0])!r}?" if near else "run it in the folder of the clone, or give its path"
        return CheckoutError(f"{root} is not {of}: expected {', '.join(files)}, found none of them; {hint}")
    return CheckoutError(
        f"{root} has not the shape of {of}; nothing was changed. Expected and not found as such", found.differences
    )


def _subfolders(root: Path) -> Iterator[Path]:
    try:
        yield from sorted(each for each in root.iterdir() if each.is_dir())
    except OSError:
        return


def scripts_in(root: Path) -> Iterator[Path]:
    """Every Python file of a checkout; not those of hidden folders, nor of a checkout inside it."""
    seen: set[Path] = set()
    for where, folders, files in os.walk(root):
        here = Path(where)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not (here / f / NAME).is_file())
        for file in sorted(files):
            path = here / file
            if file.endswith(".py") and path.is_file() and path.resolve() not in seen:
                seen.add(path.resolve())  # a script and a link to it are one
                yield path
