"""What upstream, written for torch 2.0 and numpy 1, needs and today's stack has not."""

from __future__ import annotations

import warnings

from ace_plugins.adapter import Shim

SHIMS = (
    Shim(
        "numpy_inf",
        "numpy 2 has no np.Inf, which upstream's EarlyStopping begins with",
        lambda: not _has_inf(),
        lambda: _add_inf(),
    ),
    Shim(
        "quiet_autocast",
        "torch says in every forward that torch.cuda.amp.autocast is deprecated",
        lambda: _autocast_is_deprecated(),
        lambda: warnings.filterwarnings("ignore", r"`torch\.cuda\.amp\.autocast", FutureWarning),
    ),
)


def _has_inf() -> bool:
    import numpy

    return hasattr(numpy, "Inf")


def _add_inf() -> None:
    import numpy

    vars(numpy)["Inf"] = numpy.inf


def _autocast_is_deprecated() -> bool:
    from torch.cuda.amp import autocast

    return hasattr(autocast, "__deprecated__") or hasattr(autocast.__init__, "__deprecated__")
