from .checks import CHECKS as CHECKS
from .doctor import AdapterCheck as AdapterCheck
from .doctor import AdapterCheckError as AdapterCheckError
from .doctor import check_adapter as check_adapter
from .doctor import parametrize_with_checks as parametrize_with_checks
from .kit import CheckError as CheckError
