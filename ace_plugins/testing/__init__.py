"""Test kit for adapters: `parametrize_with_checks` for pytest, `check_adapter` for everything else.

The public names are listed only in ``__init__.pyi``, and each is imported on its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
