"""What upstream, of 2021, needs and today's stack has not; and, for those who ask for it, a way without a GPU."""

from __future__ import annotations

from types import ModuleType

from ace_plugins.adapter import Shim, StandIn

SHIMS = (
    StandIn(
        "pytorch3d",
        "has to be compiled, and upstream only takes three names from its transforms",
        lambda: _package(),
    ),
    StandIn(
        "pytorch3d.transforms",
        "has to be compiled, and upstream only takes Rotate, RotateAxisAngle and random_rotations from it",
        lambda: _transforms(),
    ),
    Shim(
        "numpy_in_checkpoints",
        "upstream saves its accuracies as numpy's numbers, which torch.load refuses since 2.6",
        lambda: _load_is_strict(),
        lambda: _allow_numpy(),
    ),
    Shim(
        "cpu",
        "upstream's files call .cuda() whatever the machine has",
        lambda: True,
        lambda: _without_gpu(),
        device="cpu",
    ),
)


def _package() -> ModuleType:
    module = ModuleType("pytorch3d", "Stands in for pytorch3d, which is not installed, with some transforms alone.")
    vars(module)["__path__"] = []
    return module


def _transforms() -> ModuleType:
    from . import transforms

    module = ModuleType("pytorch3d.transforms", "Stands in for pytorch3d.transforms, which is not installed.")
    for name in ("Rotate", "RotateAxisAngle", "random_rotations"):
        vars(module)[name] = getattr(transforms, name)
    return module


def _load_is_strict() -> bool:
    import inspect

    import torch

    return inspect.signature(torch.load).parameters["weights_only"].default is not False


def _allow_numpy() -> None:
    from torch.serialization import add_safe_globals

    from ace_plugins.adapter import numpy_numbers

    add_safe_globals(numpy_numbers())


def _without_gpu() -> None:
    from .without_gpu import redirect

    redirect()
