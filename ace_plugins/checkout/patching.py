"""Patches, reverts and inspects a checkout. All changes are planned before any file is changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.upstreams import Checkout
from ..errors import AceError, CheckoutError
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.config import Config
from ..settings.sources import RUNS, find_misspelt, read_environment, variable
from ..settings.toml_file import NAME, SettingsFile, is_as_written, is_ours, read, update, write
from .changes import Change, Plan, read_content
from .layout import Layout, fits, read_layout
from .marking import is_marked, mark, unmark

SEPARATE = (NAME, ".git", "pyvenv.cfg", "conda-meta")  # a folder with one of these is a checkout or an environment


@dataclass(frozen=True)
class PatchPlan(Plan):
    """A plan to patch a checkout, with the checkout's layout and settings."""

    layout: Layout = field(kw_only=True)
    settings: SettingsFile = field(kw_only=True)
    config: Config = field(kw_only=True)


def plan_patch(root: Path, plugin: Plugin, settings: Mapping[str, Any]) -> PatchPlan:
    """Plan to patch a checkout, or to change settings of a patched one. All settings and files are checked here."""
    root = check_folder(root)
    checkout = require_checkout(plugin)
    for name in (NAME, *checkout.scripts):
        if outside := find_target_outside(root, root / name):
            where = f"{str(outside)!r}, outside of the checkout {root}"
            raise CheckoutError(f"{name} is a link to {where}; nothing was changed; replace the link by a copy")
    before = read_content(root / NAME)
    file = None if before is None else read(root / NAME, before)
    if file is not None and file.adapter != plugin.name:
        raise CheckoutError(
            f"{root} is patched for adapter {file.adapter!r} ({file.where('adapter')}), not {plugin.name!r}: "
            "one checkout has one adapter; run 'ace-patch revert' there first"
        )
    config = plugin.resolve(file=file, options=settings).config
    if file is None:
        file = write(root / NAME, plugin.name, checkout.scripts[0], settings, plugin.presets)
    else:
        file = update(file, settings, checkout.scripts[0], plugin.presets)
    found = read_layout(root, checkout)
    if found.differences:
        near = _find_nearby(root, checkout)
        hint = f"did you mean {str(near)!r}?" if near else "give the clone's folder; nothing was changed. Differences"
        expected = f"a checkout of {checkout.repository}, which adapter {plugin.name!r} patches"
        raise CheckoutError(f"{root} is not {expected}; {hint}", () if near else found.differences)
    # The settings file comes first: a process killed half-way must not leave a marked script without settings.
    changes = [Change(file.path, before, file.text.encode())]
    for script in checkout.scripts:
        source = (root / script).read_bytes()
        changes.append(Change(root / script, source, mark(source, script)))
    return PatchPlan(root, tuple(changes), layout=found, settings=file, config=config)


def plan_revert(root: Path, *, purge: bool = False) -> Plan:
    """Plan to remove the marked lines and ``ace.toml``. An edited ``ace.toml`` is removed only with ``purge``."""
    root = check_folder(root)
    kept = []
    sources = ((path, read_content(path) or b"") for path in _find_scripts(root))
    changes = [Change(path, source, unmark(source)) for path, source in sources if is_marked(source)]
    content = read_content(root / NAME)
    if content is not None:
        text = content.decode("utf-8-sig", "replace")
        if outside := find_target_outside(root, root / NAME):
            kept.append(f"{NAME}: it is a link that leads out of the checkout, to {str(outside)!r}")
        elif is_as_written(text) or (purge and is_ours(text)):
            changes.append(Change(root / NAME, content, None))
        elif is_ours(text):
            kept.append(f"{NAME}: it was edited; 'ace-patch revert --purge' removes it too")
        else:
            kept.append(f"{NAME}: it is not a file of ace-patch")
    return Plan(root, tuple(changes), tuple(kept))


@dataclass(frozen=True)
class State:
    """The state of a checkout, with all problems, as ``ace-patch status`` prints it."""

    root: Path
    adapter: Plugin
    layout: Layout
    scripts: Mapping[str, str]
    """Mapping from each entry script to "patched", "not patched", or the reason why it cannot be read."""
    settings: SettingsFile | None
    config: Config | None
    environment: Mapping[str, str]
    """Environment variables, with their values, that override the settings file in this shell."""
    problems: tuple[str, ...]  # problems that would stop a run
    runs: tuple[str, ...]  # names of the folders that contain the traces of runs

    @property
    def patched(self) -> bool:
        return self.settings is not None and set(self.scripts.values()) == {"patched"}

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON."""
        return {
            "checkout": str(self.root),
            "adapter": self.adapter.name,
            "commit": self.layout.commit,
            "tried": self.layout.tried,
            "patched": self.patched,
            "scripts": dict(self.scripts),
            "settings": None if self.settings is None else dict(self.settings.settings),
            "edited": None if self.settings is None else not is_as_written(self.settings.text),
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "environment": dict(self.environment),
            "problems": list(self.problems),
            "warnings": [] if self.config is None else list(self.config.cautions),
            "runs": list(self.runs),
        }


def read_state(root: Path) -> State:
    """Find the adapter of a checkout, and return the state of the checkout."""
    root, problems = check_folder(root), find_misspelt(os.environ)
    settings, config, variables = None, None, {}
    exists = (root / NAME).is_file()
    with _collect(problems):
        settings = read(root / NAME) if exists else None
    plugin = registry().adapter(settings.adapter) if settings else _find_adapter(root)
    with _collect(problems):
        config = None if settings is None else plugin.resolve(file=settings).config
    with _collect(problems):
        variables = {variable(name): os.environ[variable(name)] for name in read_environment(os.environ)}
    checkout = require_checkout(plugin)
    scripts = {script: _read_script_state(root / script) for script in checkout.scripts}
    if "patched" in scripts.values() and not exists:
        do = f"'ace-patch {plugin.name}' writes it again, 'ace-patch revert' removes the marked lines"
        problems.append(f"{NAME}: missing, so patched scripts stop; {do}")
    found = read_layout(root, checkout)
    return State(
        root=root,
        adapter=plugin,
        layout=found,
        scripts=scripts,
        settings=settings,
        config=config,
        environment=variables,
        problems=(*problems, *(f"unexpected layout: {difference}" for difference in found.differences)),
        runs=tuple(sorted(each.name for each in (root / RUNS).glob("*") if each.is_dir())),
    )


@contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    """Catch an AceError from the block and add its message to the problems."""
    try:
        yield
    except AceError as error:
        problems.append(str(error))


def _read_script_state(path: Path) -> str:
    try:
        return "patched" if is_marked(path.read_bytes()) else "not patched"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _find_adapter(root: Path) -> Plugin:
    """Return the only adapter whose expected layout matches a checkout."""
    known = registry().with_checkouts
    fitting = [p for p in known if fits(root, require_checkout(p))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(f"{p.name} ({p.distribution})" for p in fitting)
        raise CheckoutError(f"several adapters support {root}: {names}; patch it with 'ace-patch NAME'")
    near = next((found for p in known if (found := _find_nearby(root, require_checkout(p))) is not None), None)
    expected = ", ".join(f"{p.name} ({require_checkout(p).repository})" for p in known) or "none (none is installed)"
    hint = f"did you mean {str(near)!r}?" if near else f"expected one of {expected}"
    raise CheckoutError(f"{root} is not a checkout that an adapter patches: {hint}")


def require_checkout(plugin: Plugin) -> Checkout:
    """Return the checkout that an adapter patches; raise an AceError if its upstream is an installed package."""
    if plugin.patches.checkout is None:
        raise AceError(
            f"the upstream of adapter {plugin.name!r} is an installed package, so there is no clone to patch; run "
            f"'ace-patch run {plugin.name} -- your_script.py' instead"
        )
    return plugin.patches.checkout


def find_target_outside(root: Path, path: Path) -> Path | None:
    """Return the target of a link that leads out of the checkout; None for any other path."""
    target = Path(os.path.realpath(path))
    return None if target.is_relative_to(os.path.realpath(root)) else target


def check_folder(root: Path) -> Path:
    """Return the absolute path of a folder without resolving links; raise a CheckoutError if it is not a folder."""
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing there"
        raise CheckoutError(f"checkout {str(root)!r}: expected a folder, found {found}; give the folder of the clone")
    return root.absolute()


def _find_nearby(root: Path, checkout: Checkout) -> Path | None:
    """Return a folder above or directly below ``root`` that has the layout of this checkout, or None."""
    below = sorted(each for each in root.iterdir() if each.is_dir())
    return next((each for each in (*root.parents, *below) if fits(each, checkout)), None)


def _find_scripts(root: Path) -> Iterator[Path]:
    """Yield the Python files of a checkout. Skip hidden folders, environments, nested checkouts and links."""
    for where, folders, files in os.walk(root):
        here = Path(where)
        own = [name for name in folders if not name.startswith(".") and name != "site-packages"]
        # os.path.exists is False for a folder that may not be read, where Path.exists raises an error.
        folders[:] = sorted(name for name in own if not any(os.path.exists(here / name / each) for each in SEPARATE))
        paths = [here / file for file in sorted(files) if file.endswith(".py")]
        yield from (path for path in paths if path.is_file() and find_target_outside(root, path) is None)
