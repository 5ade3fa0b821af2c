"""Train the equivariant models you already use under Adaptive Constrained Equivariance (ACE).

    from ace_plugins import attach
    model = attach(SchNet(...))        # then build the optimizer and train as before

This module is the public API for people who train models. Adapter authors import from `ace_plugins.adapter`, and
tests of adapters from `ace_plugins.testing`. The public names are listed only in ``__init__.pyi``, and each is
imported on its first use, so that ``ace-patch --help`` does not have to import torch.
"""

import lazy_loader

__version__ = "0.1.0"

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _lazy(name)
    except AttributeError:
        from ._moved import find_moved  # reached only by names that have moved since 0.1.0, and typos

        return find_moved(name)
