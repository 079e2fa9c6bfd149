"""Checks of the options of a strategy."""

from sagellm.core.errors import PlanError
from sagellm.core.options import option_checks

__all__ = ["check_count", "check_number"]

check_number, check_count = option_checks("strategy", PlanError)
