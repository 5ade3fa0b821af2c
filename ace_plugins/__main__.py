"""``python -m ace_plugins`` is ``ace-patch``, for places where only a module can be run (torchrun)."""

from .cli.main import main

main(prog_name="python -m ace_plugins")
