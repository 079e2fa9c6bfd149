"""Where commands look for modules of the user."""

from sagellm.core.current_folder import look_in_current_folder

__all__ = ["look_in_current_folder"]
