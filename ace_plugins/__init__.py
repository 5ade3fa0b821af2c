"""Train your equivariant models with Adaptive Constrained Equivariance (ACE).

    from ace_plugins import attach
    model = attach(SchNet(...))        # then build the optimizer and train as before

This module is the public API for people who train models. Adapter authors import from `ace_plugins.adapter`, and
tests of adapters from `ace_plugins.testing`. The public names are listed only in ``__init__.pyi``, and each is
imported on its first use, so that ``ace-patch --help`` does not have to import torch.
"""

import lazy_loader

__version__ = "0.1.0"

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_MOVED = {"Audit": "testing.audit", "Bounds": "testing.bounds", "EquivarianceError": "symmetry.measure"}
_MOVED |= dict.fromkeys(("SiteStatus", "Status"), "report.status")


def __getattr__(name: str) -> object:
    try:
        return _lazy(name)
    except AttributeError:
        return _find_moved(name, __name__)


def _find_moved(name: str, former: str) -> object:
    """Return an object that was in the module ``former`` in version 0.1.0, and warn that it has moved."""
    import importlib
    import warnings

    home = f"{__name__}.{_MOVED.get(name, 'adapter')}"
    module = importlib.import_module(home)
    if name.startswith("_") or not (name in _MOVED or name in module.__all__):
        raise AttributeError(f"module {former!r} has no attribute {name!r}")
    warnings.warn(f"{former}.{name} has moved; import it from {home}", DeprecationWarning, stacklevel=3)
    return getattr(module, name)
