"""The error of this package."""

from sagellm.core.errors import ConfigError

__all__ = ["ModelError"]


class ModelError(ConfigError):
    """A model cannot be found, fetched, converted or served."""
