"""A small model built from what every Python carries, so that a server can be tried without a model hub.

Importing this package imports neither torch nor transformers.
"""

from sagellm.demo_model.base import DemoModelError, DemoRecipe
from sagellm.demo_model.cache import ensure_demo_model
from sagellm.demo_model.random_model import write_random_model

__all__ = ["DemoModelError", "DemoRecipe", "ensure_demo_model", "write_random_model"]
