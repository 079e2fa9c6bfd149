"""Which architectures run natively on the CPU device. `sagellm check device cpu` compares the answers of all of them."""

import pytest

from sagellm.engines.lmdeploy.architecture import cpu_support
from sagellm.engines.lmdeploy.contract.architectures import ARCHITECTURES, write_model

EAGER = ("GptOss", "DeepseekV2")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_how_an_architecture_runs(tmp_path, name):
    write_model(name, tmp_path)
    found = cpu_support(tmp_path, "float32")
    assert not found.missing and (found.eager == "") == (name not in EAGER), found
