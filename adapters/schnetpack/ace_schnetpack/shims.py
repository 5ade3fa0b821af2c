"""Compatibility shims: SchNetPack 2.1 was written for older versions of torch and Lightning."""

from __future__ import annotations

from importlib.metadata import version
from inspect import signature
from typing import Any, TypeVar

from packaging.version import Version

from ace_plugins.adapter import Shim, whenever_imported


def _dataloader() -> Any:
    import torch.utils.data.dataloader

    return torch.utils.data.dataloader


def _scheduler() -> Any:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return ReduceLROnPlateau


def _accept_verbose(scheduler: Any) -> None:
    init = scheduler.__init__

    def __init__(self: Any, *args: Any, verbose: Any = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    scheduler.__init__ = __init__


def _load_whole_checkpoints() -> None:
    """Make SchNetPack's tasks, and nothing else, load checkpoints with weights_only=False."""
    whenever_imported(_change_trainers, name="pytorch_lightning.trainer.trainer")
    whenever_imported(_change_tasks, name="schnetpack.task")


def _change_trainers(module: Any) -> None:
    import wrapt

    def run(wrapped: Any, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from schnetpack.task import AtomisticTask

        task = args[0] if args else kwargs.get("model")
        return wrapped(*args, **(_load_whole(kwargs) if isinstance(task, AtomisticTask) else kwargs))

    for name in ("fit", "validate", "test", "predict"):
        wrapt.wrap_function_wrapper(module, f"Trainer.{name}", run)


def _change_tasks(module: Any) -> None:
    def load_from_checkpoint(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(module.AtomisticTask, cls).load_from_checkpoint(*args, **_load_whole(kwargs))

    module.AtomisticTask.load_from_checkpoint = classmethod(load_from_checkpoint)


def _load_whole(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("weights_only") is not None else {**kwargs, "weights_only": False}


SHIMS = (
    Shim(
        "dataloader_T_co",
        "torch.utils.data.dataloader no longer has T_co, which upstream imports for an annotation",
        lambda: not hasattr(_dataloader(), "T_co"),
        lambda: setattr(_dataloader(), "T_co", TypeVar("T_co", covariant=True)),
        first=True,
    ),
    Shim(
        "scheduler_verbose",
        "torch's schedulers no longer accept verbose, which upstream passes to ReduceLROnPlateau",
        lambda: "verbose" not in signature(_scheduler().__init__).parameters,
        lambda: _accept_verbose(_scheduler()),
    ),
    Shim(
        "whole_checkpoints",
        "Lightning 2.6 loads only tensors by default, and upstream's checkpoints contain the whole model",
        lambda: Version(version("pytorch-lightning")) >= Version("2.6"),
        _load_whole_checkpoints,
        first=True,  # before upstream is imported: it changes classes at their import
    ),
)
