"""The public API for people who write adapters: sites, upstreams, groups, actions, branches and shims.

    from ace_plugins.adapter import E3, GroupAction, Positions, Site, Upstream, hookimpl

The names are listed only in ``adapter.pyi``, and each is imported on its first use, so that loading an adapter does
not import torch.
"""

import sys

import lazy_loader

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__package__, __file__)


def __getattr__(name: str) -> object:
    value = _lazy(name)
    # lazy_loader stores the value on the package ace_plugins, whose API is smaller. Store it in this module instead.
    vars(sys.modules[__package__]).pop(name, None)
    globals()[name] = value
    return value
