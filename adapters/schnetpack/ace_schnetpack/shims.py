"""What SchNetPack 2.1 needs and today's torch and Lightning have not."""

from __future__ import annotations

from importlib.metadata import version
from inspect import signature
from typing import Any, TypeVar

from packaging.version import Version

from ace_plugins.adapter import Shim, whenever_imported

SHIMS = (
    Shim(
        "dataloader_T_co",
        "torch.utils.data.dataloader has no T_co any more, which upstream imports for an annotation",
        lambda: not hasattr(_dataloader(), "T_co"),
        lambda: setattr(_dataloader(), "T_co", TypeVar("T_co", covariant=True)),
        first=True,
    ),
    Shim(
        "scheduler_verbose",
        "torch's schedulers no longer take verbose, which upstream's ReduceLROnPlateau passes",
        lambda: "verbose" not in signature(_scheduler().__init__).parameters,
        lambda: _accept_verbose(_scheduler()),
    ),
    Shim(
        "whole_checkpoints",
        "Lightning 2.6 reads tensors alone unless told otherwise, and upstream's checkpoints hold the whole model",
        lambda: Version(version("pytorch-lightning")) >= Version("2.6"),
        lambda: _read_whole_checkpoints(),
        first=True,  # for classes that are patched as soon as they are there
    ),
)


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


def _read_whole_checkpoints() -> None:
    """For tasks of SchNetPack alone: what they go on from, test and load is read as they wrote it."""
    whenever_imported(_by_trainers, name="pytorch_lightning.trainer.trainer")
    whenever_imported(_by_tasks, name="schnetpack.task")


def _by_trainers(module: Any) -> None:
    import wrapt

    def run(wrapped: Any, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from schnetpack.task import AtomisticTask

        task = args[0] if args else kwargs.get("model")
        return wrapped(*args, **(_whole(kwargs) if isinstance(task, AtomisticTask) else kwargs))

    for name in ("fit", "validate", "test", "predict"):
        wrapt.wrap_function_wrapper(module, f"Trainer.{name}", run)


def _by_tasks(module: Any) -> None:
    def load_from_checkpoint(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(module.AtomisticTask, cls).load_from_checkpoint(*args, **_whole(kwargs))

    module.AtomisticTask.load_from_checkpoint = classmethod(load_from_checkpoint)


def _whole(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("weights_only") is not None else {**kwargs, "weights_only": False}
