"""What adapters are judged by: `check_adapter` runs the whole battery."""

from .battery import CHECKS, AdapterCheckError, Failure, Kit, check_adapter

__all__ = ["CHECKS", "AdapterCheckError", "Failure", "Kit", "check_adapter"]
