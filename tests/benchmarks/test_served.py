"""Counters inside a server's processes, and the comparison of two servers that reads them."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from benchmarks import served, served_probe

PROGRAM = """
import sys
from sagellm.core.config import SageConfig
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine

prompt, params = [*range(5, 105)], SamplingParams(max_new_tokens=4, ignore_eos=True)
engine = LMDeployEngine(SageConfig(device="cpu", block_size=16, tensor_parallel=int(sys.argv[2])), sys.argv[1])
for _ in range(2):
    engine.generate([prompt], params)
engine.close()
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_process_counts_hits_steps_and_exchanges(tmp_path, model_folder, workers):
    folder = tmp_path / "counts"
    env = os.environ | served_probe.environment(folder)
    subprocess.run([sys.executable, "-c", PROGRAM, model_folder("llama"), str(workers)], env=env, check=True)
    counted = served_probe.read(folder).values()
    assert sum(each.asked for each in counted) == 200 and sum(each.found for each in counted) == 96
    steps = [each for each in counted if each.step_s]
    assert len(steps) == workers
    assert all((0 < each.exchange_s < each.step_s) if workers > 1 else each.exchange_s == 0 for each in steps)


@pytest.mark.slow
def test_both_servers_answer_and_are_counted(tmp_path):
    done = CliRunner().invoke(served.main, ["--model", "demo", "--rounds", "1", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert '"kv_hit_rate": {"median": 1.0' in done.stdout and '"mfu"' in done.stdout
