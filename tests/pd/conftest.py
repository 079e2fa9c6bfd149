import pytest


@pytest.fixture
def prompt(request):
    """Another one for each test: nothing of it is cached."""
    return f"{request.node.name}: " + "what was computed here is wanted there. " * 6
