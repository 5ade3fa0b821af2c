"""The command ``ace-patch`` as ``python -m ace_plugins``, for launchers that run modules, such as torchrun."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # do not import modules of the current folder, as ace-patch does not: it may be a stranger's clone

from .cli.main import main

main(prog_name="python -m ace_plugins")
