"""``python -m ace_plugins``: the command ``ace-patch`` for launchers that run modules, such as torchrun."""

from .cli.main import main

main(prog_name="python -m ace_plugins")
