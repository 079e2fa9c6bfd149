"""LMDeploy 0.11.0: patch state, the PyTorch engine's hook adapter, and a CPU device that lives outside its tree.

Only this package imports `lmdeploy`. Importing it stays cheap: neither torch nor LMDeploy is loaded before it is needed.
"""

from sagellm.patching import TreeState, status


def patch_state() -> TreeState:
    """State of the LMDeploy installed in this environment: applied, not applied, partial or foreign.

    Hashes the touched files; does not import LMDeploy.
    """
    return status()
