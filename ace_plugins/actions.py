"""The public home of groups and actions: what an adapter's ``ace_group_action`` is made of."""

from .symmetry.actions import *  # noqa: F403
from .symmetry.actions import __all__ as __all__
