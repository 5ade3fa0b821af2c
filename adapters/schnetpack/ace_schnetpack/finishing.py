"""Removes ACE from the file ``best_model``, so that the file loads in plain SchNetPack.

``AtomisticTask.save_model`` pickles the whole model whenever validation improves, and once more at the end. In modes
that deploy f_eq, ACE is removed from the file each time. In modes that deploy the branches, the branches stay in it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import wrapt

import ace_plugins as ace


def install(model: Any) -> None:
    """Wrap ``save_model`` in this process, unless it is wrapped, if this adapter has attached the model."""
    if ace.status(model).adapter != "schnetpack":
        return
    from schnetpack.task import AtomisticTask

    if not getattr(AtomisticTask.save_model, "_self_plain", False):
        wrapt.wrap_function_wrapper(AtomisticTask, "save_model", _save_model)
        AtomisticTask.save_model._self_plain = True


def _save_model(save: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = save(*args, **kwargs)
    now = ace.status(task.model)
    if now.sites and task.global_rank == 0 and not now.branches_in_eval:
        _make_plain(os.fspath(args[0] if args else kwargs["path"]))
    return result


def _make_plain(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ace.AceWarning)  # gamma is not 0 yet, but f_eq is what strict mode deploys
        ace.export(path, f"{path}.plain", trust=True)  # trusted: this process has just written it
    os.replace(f"{path}.plain", path)
