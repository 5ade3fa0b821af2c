"""The command ``ace-patch`` as ``python -m ace_plugins``, for launchers that run modules, such as torchrun."""

from .cli.main import main

main(prog_name="python -m ace_plugins")
