"""``import ace_plugins.activate``, the line that ace-patch puts into a script: models it builds train with ACE."""

from .run.marked import activate, importing_frame

activate(importing_frame())
