"""Compatibility shims: upstream was written for torch 2.0 and numpy 1."""

from __future__ import annotations

import warnings

from ace_plugins.adapter import Shim


def _has_inf() -> bool:
    import numpy

    return hasattr(numpy, "Inf")


def _add_inf() -> None:
    import numpy

    vars(numpy)["Inf"] = numpy.inf


def _autocast_is_deprecated() -> bool:
    from torch.cuda.amp import autocast

    return hasattr(autocast, "__deprecated__") or hasattr(autocast.__init__, "__deprecated__")


SHIMS = (
    Shim("numpy_inf", "numpy 2 has no np.Inf, which upstream's EarlyStopping uses", lambda: not _has_inf(), _add_inf),
    Shim(
        "quiet_autocast",
        "torch warns in every forward pass that torch.cuda.amp.autocast is deprecated",
        _autocast_is_deprecated,
        lambda: warnings.filterwarnings("ignore", r"`torch\.cuda\.amp\.autocast", FutureWarning),
    ),
)
