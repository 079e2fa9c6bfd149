"""Tests of the libraries of a server and its engine: those that nothing needs are not loaded, but can be imported later."""

import json
import subprocess
import sys

CODE = """
import json, sys
from sagellm.engines.lmdeploy.libraries import load_lmdeploy, only_engine

load_lmdeploy()
only_engine()
import lmdeploy.pytorch.engine.mp_engine.zmq_engine, lmdeploy.pytorch.models.llama, lmdeploy.serve.openai.api_server
import torch
import transformers.models as models
from transformers import AutoTokenizer
from transformers.utils.import_utils import define_import_structure

torch.testing.assert_close(torch.ones(2), torch.ones(2))
heavy = ("torch._dynamo", "torch.distributed.tensor", "sympy", "lmdeploy.lite", "transformers.models.auto.modeling_auto")
found = {"loaded": [name for name in heavy if name in sys.modules]}
anew = type(models)("anew", models.__file__, define_import_structure(models.__file__))
found["models"] = len(models._class_to_module), models._class_to_module == anew._class_to_module

from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
import lmdeploy.lite.quantization.weight.quant_utils as whole
from lmdeploy.pytorch.nn.quant_utils import quant_blocked_fp8

found["later"] = [each.__module__ for each in (DTensor, AutoModelForCausalLM, whole.quant_blocked_fp8, quant_blocked_fp8)]
found["compiled"] = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2)).tolist()
print(json.dumps(found))
"""


def test_what_nothing_needs_is_loaded_once_it_is_asked_for():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["loaded"] == []
    number, is_same = found["models"]  # all that a search of the folders finds
    assert is_same and number > 1000
    quantizing = "lmdeploy.lite.quantization.weight.quant_utils"
    assert found["later"] == ["torch.distributed.tensor", "transformers.models.auto.modeling_auto", quantizing, quantizing]
    assert found["compiled"] == [2.0, 2.0]
