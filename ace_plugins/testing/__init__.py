"""Test kit for adapters: `parametrize_with_checks` for pytest, `check_adapter` for everything else.

The public names are listed once, in ``__init__.pyi``, and are imported on first use: pytest loads its plugin from this
package wherever ace-plugins is installed, and must not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
