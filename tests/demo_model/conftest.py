"""A recipe that trains in a second, and one folder built from it for the tests that only read."""

from pathlib import Path

import pytest

from sagellm.demo_model import DemoRecipe, ensure_demo_model


@pytest.fixture(scope="session")
def tiny_recipe() -> DemoRecipe:
    """A few steps of a few thousand parameters over a slice of the standard library."""
    return DemoRecipe(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        window_tokens=32,
        batch_size=2,
        steps=3,
        max_files=20,
        max_functions=40,
        max_plain=8,
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: DemoRecipe) -> Path:
    """The tiny model, built once; not to be written to."""
    return ensure_demo_model(tmp_path_factory.mktemp("cache"), recipe=tiny_recipe)
