import pytest

from sagellm.engines.lmdeploy.speculative.trial import EngineTrial


@pytest.fixture(scope="session")
def trial():
    """Answers without guesses are computed once for all tests."""
    with EngineTrial() as trial:
        yield trial
