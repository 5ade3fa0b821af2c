"""Imported by Python at start-up, since ``ace-patch run`` puts this folder on PYTHONPATH.

Prepares the process for ACE and then imports the user's own ``sitecustomize``, if there is one. The preparation
must not raise: Python would hide the traceback of an exception, and SystemExit would end the process.
"""

import importlib
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_ours = sys.modules.pop(__name__)
sys.path[:] = [folder for folder in sys.path if folder != _here]

try:
    from ace_plugins.run.activation import inherit

    inherit()
except BaseException as _error:  # for example another Python without ace_plugins
    if sys.stderr is not None:
        sys.stderr.write("ace: nothing is attached in this process of %s: %s\n" % (sys.executable, _error))  # noqa: UP031

try:
    importlib.import_module("sitecustomize")  # the user's own
except ImportError as _error:
    if getattr(_error, "name", None) != "sitecustomize":
        raise
    sys.modules[__name__] = _ours  # there is none; the import of this module is still in progress
