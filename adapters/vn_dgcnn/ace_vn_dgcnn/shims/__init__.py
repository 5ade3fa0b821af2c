"""Compatibility shims: a stub for PyTorch3D if it is not installed, and a way to run without a GPU."""

from __future__ import annotations

from types import ModuleType

from ace_plugins.adapter import Shim, StandIn


def _package() -> ModuleType:
    module = ModuleType("pytorch3d", "Stub of pytorch3d, which is not installed. It only has some transforms.")
    vars(module)["__path__"] = []
    return module


def _transforms() -> ModuleType:
    from . import transforms

    module = ModuleType("pytorch3d.transforms", "Stub of pytorch3d.transforms, which is not installed.")
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


def _redirect_to_cpu() -> None:
    from .without_gpu import redirect

    redirect()


SHIMS = (
    StandIn("pytorch3d", "has to be compiled, and upstream only uses three names of its transforms", _package),
    StandIn(
        "pytorch3d.transforms",
        "has to be compiled, and upstream only uses Rotate, RotateAxisAngle and random_rotations",
        _transforms,
    ),
    Shim(
        "numpy_in_checkpoints",
        "upstream saves accuracies as numpy numbers, which torch.load refuses since 2.6",
        _load_is_strict,
        _allow_numpy,
    ),
    Shim("cpu", "upstream's files call .cuda() on every machine", lambda: True, _redirect_to_cpu, device="cpu"),
)
