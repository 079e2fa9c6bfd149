"""The patch tool: applies, checks, reverses and regenerates the patch series on an LMDeploy tree.

Standard library only, so that it runs before anything is installed, and it never imports LMDeploy.
"""

from sagellm.patching.edit import CheckReport, Outcome, apply, check, reverse
from sagellm.patching.regenerate import RefreshReport, refresh
from sagellm.patching.state import FileState, PatchState, TreeState, status
from sagellm.patching.tree import default_target, default_targets

__all__ = [
    "CheckReport",
    "FileState",
    "Outcome",
    "PatchState",
    "RefreshReport",
    "TreeState",
    "apply",
    "check",
    "default_target",
    "default_targets",
    "refresh",
    "reverse",
    "status",
]
