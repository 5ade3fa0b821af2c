"""How a checkout is: whose, at which commit, patched or not, with which settings, and what ran in it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AceError, CheckoutError
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.config import Config
from ..settings.sources import RUNS, find_misspelt, read_environment, variable
from ..settings.toml_file import NAME, SettingsFile, read
from .layout import Layout, fits, layout
from .marking import is_marked
from .patching import checkout_of, folder, nearby


@dataclass(frozen=True)
class State:
    """What was found, the good and the bad: this is where people look when something is wrong."""

    root: Path
    adapter: Plugin
    layout: Layout
    scripts: Mapping[str, str]
    """Per entry script: "patched" or "not patched", or why that cannot be told."""
    settings: SettingsFile | None
    config: Config | None
    environment: Mapping[str, str]
    """Variables that go before the settings file in this shell."""
    problems: tuple[str, ...]
    """What would stop a run."""
    runs: tuple[str, ...]

    @property
    def patched(self) -> bool:
        return self.settings is not None and set(self.scripts.values()) == {"patched"}

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkout": str(self.root),
            "adapter": self.adapter.name,
            "commit": self.layout.commit,
            "tried": self.layout.tried,
            "patched": self.patched,
            "scripts": dict(self.scripts),
            "settings": None if self.settings is None else dict(self.settings.settings),
            "edited": None if self.settings is None else not self.settings.as_written,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "environment": dict(self.environment),
            "problems": list(self.problems),
            "warnings": [] if self.config is None else list(self.config.cautions),
            "runs": list(self.runs),
        }


def state(root: Path) -> State:
    """Whose checkout a folder is, and how it is."""
    root = folder(root)
    problems = find_misspelt(os.environ)
    settings, config, variables = None, None, {}
    there = (root / NAME).is_file()
    with _told(problems):
        settings = read(root / NAME) if there else None
    plugin = registry().adapter(settings.adapter) if settings else _claiming(root)
    checkout = checkout_of(plugin)
    with _told(problems):
        config = None if settings is None else plugin.resolve(file=settings).config
    with _told(problems):
        variables = {variable(name): os.environ[variable(name)] for name in read_environment(os.environ)}
    scripts = {script: _script_state(root / script) for script in checkout.scripts}
    if "patched" in scripts.values() and not there:
        problems.append(
            f"{NAME}: missing, so that patched scripts stop; 'ace-patch {plugin.name}' writes it again, 'ace-patch "
            "revert' takes their marked lines out"
        )
    found = layout(root, checkout)
    return State(
        root=root,
        adapter=plugin,
        layout=found,
        scripts=scripts,
        settings=settings,
        config=config,
        environment=variables,
        problems=(*problems, *(f"does not fit: {difference}" for difference in found.differences)),
        runs=tuple(sorted(each.name for each in (root / RUNS).glob("*") if each.is_dir())),
    )


@contextmanager
def _told(problems: list[str]) -> Iterator[None]:
    """What goes wrong is one of the problems, and the rest is looked at all the same."""
    try:
        yield
    except AceError as error:
        problems.append(str(error))


def _script_state(path: Path) -> str:
    try:
        return "patched" if is_marked(path.read_bytes()) else "not patched"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _claiming(root: Path) -> Plugin:
    """The adapter whose checkout this is, by its shape."""
    known = registry().with_checkouts
    fitting = [p for p in known if fits(root, checkout_of(p))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(f"{p.name} ({p.distribution})" for p in fitting)
        raise CheckoutError(f"several adapters claim {root}: {names}; say which, as 'ace-patch {fitting[0].name}'")
    near = next((found for p in known if (found := nearby(root, checkout_of(p))) is not None), None)
    expected = ", ".join(f"{p.name} ({checkout_of(p).repository})" for p in known) or "none, as none is installed"
    hint = f"did you mean {str(near)!r}?" if near else f"expected one of {expected}"
    raise CheckoutError(f"{root} is no checkout of an upstream that an adapter patches: {hint}")
