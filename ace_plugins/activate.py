"""Module that scripts patched by ace-patch import. It attaches ACE to the models that such a script builds."""

from .run.launch import activate

activate()
