"""audit of an adapter's own example, as it is built or with the weights of a checkpoint; or of a model saved whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..engine.audit import Audit, audit
from ..engine.checkpoints import read_checkpoint
from ..engine.measuring import averaged, use_branches
from ..engine.state import find
from ..errors import AceError, AceWarning, AdapterError, CheckpointError, ConfigError
from ..patch.shims import REPAIRS
from ..plugins.plugin import one_line
from ..symmetry.measuring import EquivarianceError
from .examples import attached_example, given_example


@dataclass(frozen=True)
class ExampleAudit:
    """An audit, and what it is of."""

    adapter: str
    upstream: str
    model: str
    checkpoint: str
    """Where the weights come from; "" for those the example begins with."""
    branches: bool
    """Whether the branches took part."""
    sites: dict[str, str]
    """Site -> the submodule it adds to."""
    found: Audit
    averaged: tuple[int, EquivarianceError] | None
    """Random frames that the mean was taken over, and the error of that."""

    def to_dict(self) -> dict[str, Any]:
        mean = self.averaged and {"samples": self.averaged[0], "error": self.averaged[1].to_dict()}
        about = {name: getattr(self, name) for name in ("adapter", "upstream", "model", "checkpoint", "branches")}
        return {**about, "sites": self.sites, **self.found.to_dict(), "averaged": mean}


def audit_example(
    name: str,
    *,
    checkout: Path | None = None,
    checkpoint: Path | None = None,
    trust: bool = False,
    branches_on: bool | None = None,
    samples: int = 8,
    average: int | None = None,
    seed: int = 0,
) -> ExampleAudit:
    """Build the adapter's example, load the checkpoint if one is given, and audit it.

    Without ``branches_on`` it is audited as its mode deploys it: strict mode without branches. ``average`` also
    measures the mean over so many random frames. A checkpoint that is a model saved whole is read if it is trusted,
    and audited on a batch that the adapter makes for it.
    """
    if average is not None and average < 1:
        raise ConfigError(f"averaged {average}: expected at least 1 random frame")
    if trust:
        REPAIRS.make_importable()
    content = None if checkpoint is None else read_checkpoint(checkpoint, trust=trust)
    if isinstance(content, nn.Module):
        built = given_example(name, content, seed, checkout=checkout)
        model = built.model.eval()
    else:
        built = attached_example(name, seed, checkout=checkout)
        model = built.model.eval()
        if checkpoint is not None:
            load(model, checkpoint, content)
    ace = find(model)
    if ace is None and branches_on:
        raise ConfigError(f"branches on: the model in {checkpoint} has no ACE attached; leave that out")
    with nullcontext() if branches_on is None or ace is None else use_branches(model, branches_on):
        on = ace is not None and ace.active()
        try:
            found = audit(model, built.batch, samples=samples, seed=seed)
            mean = None
            if average is not None:
                smooth = averaged(model, average)
                whole = audit(smooth, built.batch, smooth.action, samples=samples, seed=seed, layers=False)
                mean = average, whole.error
        except AceError:
            raise
        except Exception as error:
            raise AdapterError(f"adapter {built.plugin.name!r}: its example does not run: {one_line(error)}") from error
    return ExampleAudit(
        adapter=built.plugin.name,
        upstream=built.upstream,
        model=type(model).__name__,
        checkpoint="" if checkpoint is None else str(checkpoint),
        branches=on,
        sites={site.name: site.module for site in built.sites},
        found=found,
        averaged=mean,
    )


def load(model: nn.Module, path: Path, content: Any) -> None:
    """The model's weights from a checkpoint: a state_dict, or dicts and lists with one somewhere inside."""
    own = model.state_dict()
    kinds = [state for state in _states(content) if set(state) & set(own)]
    if not kinds:
        raise CheckpointError(
            f"{path} holds no weights of {type(model).__name__}, the adapter's example: expected names such as "
            f"{', '.join(list(own)[:3])}"
        )
    best = max(kinds, key=lambda state: len(set(state) & set(own)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)  # a checkpoint of plain upstream is one to audit, too
            model.load_state_dict(best)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}, the adapter's example: {one_line(error)}; "
            "for a model of your own call audit(model, batch)"
        ) from error


def _states(content: Any) -> Iterator[dict[str, Tensor]]:
    """The state_dicts in there, without the prefix of a wrapper."""
    if isinstance(content, Mapping):
        found = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        yield found
        yield {name.removeprefix("module."): value for name, value in found.items()}
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, (list, tuple)) else ()
    for part in parts:
        if isinstance(part, (Mapping, list, tuple)):
            yield from _states(part)
