"""Imported by scripts that ace-patch has patched: the models such a script builds train with ACE."""

from .run.launch import activate

activate()
