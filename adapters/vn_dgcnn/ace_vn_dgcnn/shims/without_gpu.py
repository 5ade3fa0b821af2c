"""Redirects the hard-coded CUDA calls in upstream's files to the CPU. Other code is not affected."""

from __future__ import annotations

import sys
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ace_plugins.adapter import belongs, say, whenever_imported

from ..upstream import MODELS

FILES = tuple(f"models/{name}.py" for name in MODELS)
UTILITIES = ("models/utils/vn_dgcnn_util.py", "models/utils/dgcnn_util.py")
"""Files in which upstream calls torch.device('cuda')."""


def redirect() -> None:
    """Redirect calls for the rest of this process."""
    text = "device cpu: CUDA calls in the files of this checkout are redirected to the CPU"
    if torch.cuda.is_available():
        text += f', although this machine has a GPU ({torch.cuda.get_device_name()}); to use it, set device = "auto"'
    say(text)
    for owner in (Tensor, nn.Module):
        _redirect_calls(owner)
    for file in UTILITIES:
        whenever_imported(_redirect_devices, file=file)


def _redirect_calls(owner: Any) -> None:
    plain = owner.cuda

    @wraps(plain)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The frame that contains the call: torch's calls of itself are not redirected.
        if _is_upstream(sys._getframe(1).f_code.co_filename):
            return self.cpu()
        return plain(self, *args, **kwargs)

    owner.cuda = cuda


def _redirect_devices(module: ModuleType) -> None:
    file = getattr(module, "__file__", None) or ""
    if _is_upstream(file) and isinstance(vars(module).get("torch"), ModuleType):
        vars(module)["torch"] = _Torch("torch")


class _AnyDevice(type):
    def __call__(cls, *_: Any, **__: Any) -> torch.device:
        return torch.device("cpu")

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch.device)


class _Device(metaclass=_AnyDevice):
    """Replacement of torch.device: every device is the CPU."""


class _Torch(ModuleType):
    """Replacement of the module torch, with `_Device`."""

    device = _Device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _is_upstream(file: str) -> bool:
    return belongs(file, FILES)
