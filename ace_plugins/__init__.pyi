from .compare.results import run_comparison as run_comparison
from .engine.attach import project as project
from .engine.checkpoint import export as export
from .engine.measure import averaged as averaged
from .engine.measure import equivariance_error as equivariance_error
from .engine.measure import symmetry_left as symmetry_left
from .engine.measure import use_branches as use_branches
from .errors import AceError as AceError
from .errors import AceWarning as AceWarning
from .patch.constructors import attach as attach
from .patch.constructors import patched as patched
from .report.page import write_report as write_report
from .report.status import status as status
from .report.trace import read_trace as read_trace
from .settings.config import Config as Config
from .testing.audit import audit as audit
from .testing.bounds import bounds as bounds

__version__: str

def _find_moved(name: str, former: str) -> object: ...
