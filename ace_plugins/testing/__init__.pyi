from .checks import CHECKS as CHECKS
from .doctor import AdapterCheckError as AdapterCheckError
from .doctor import check_adapter as check_adapter
from .kit import CheckError as CheckError
from .pytest_plugin import AdapterCheck as AdapterCheck
from .pytest_plugin import parametrize_with_checks as parametrize_with_checks
