"""The command ``ace-patch`` as ``python -m ace_plugins``, for launchers that run modules, such as torchrun."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder, which may be anybody's clone: no module of it is imported, as by ace-patch

from .cli.main import main

main(prog_name="python -m ace_plugins")
