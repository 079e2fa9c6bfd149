"""Models by name, folder, file or hub id. Importing this package imports neither torch nor transformers."""

from sagellm.models.base import ModelError
from sagellm.models.resolve import ModelSource, find_model, prepare_model

__all__ = ["ModelError", "ModelSource", "find_model", "prepare_model"]
