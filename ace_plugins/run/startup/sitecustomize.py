"""Python imports this by itself when it starts: ``ace-patch run`` puts this folder on PYTHONPATH.

It prepares the process to attach ACE, and then hands on to the ``sitecustomize`` that Python would have found without
this one. An exception in here would be swallowed, and SystemExit would be fatal, so nothing may fail.
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
except BaseException as _error:
    # Such as another Python that the script starts. Its work goes on without ACE.
    if sys.stderr is not None:
        sys.stderr.write("ace: nothing is attached in this process of %s: %s\n" % (sys.executable, _error))  # noqa: UP031

try:
    importlib.import_module("sitecustomize")  # the user's own
except ImportError as _error:
    if getattr(_error, "name", None) != "sitecustomize":
        raise
    sys.modules[__name__] = _ours  # there is none, and the import of this one is still under way
