"""What SchNetPack writes: ``best_model``, the whole model pickled, is to load in plain SchNetPack.

``AtomisticTask.save_model`` writes it whenever validation finds a better one, and once more at the end. In strict mode
what is deployed is f_eq, so ACE is taken off the file right away. Where the branches are deployed they stay in it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import wrapt

import ace_plugins as ace


def install() -> None:
    """Have this process write plain models, once."""
    from schnetpack.task import AtomisticTask

    if not getattr(AtomisticTask.save_model, "_self_plain", False):
        wrapt.wrap_function_wrapper(AtomisticTask, "save_model", _save_model)
        AtomisticTask.save_model._self_plain = True


def _save_model(save: Any, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of ``save_model(path, ...)``: changes nothing but what is in the file afterwards."""
    result = save(*args, **kwargs)
    state = getattr(task.model, "ace", None)
    if state is not None and task.global_rank == 0 and not state.config.branches_in_eval:
        _make_plain(os.fspath(args[0] if args else kwargs["path"]))
    return result


def _make_plain(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ace.AceWarning)  # gamma is on its way, and f_eq alone is what strict deploys
        ace.export(path, f"{path}.plain", trust=True)  # it was written here, just now
    os.replace(f"{path}.plain", path)
