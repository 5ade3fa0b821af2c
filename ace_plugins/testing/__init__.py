"""Test kit for adapters: `parametrize_with_checks` for pytest, `check_adapter` for everything else.

The public names are listed only in ``__init__.pyi``, and each is imported on its first use. Wherever ace-plugins is
installed, pytest loads a plugin from this package at its start, so importing the package must not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
