"""Tensor-parallel workers that are actors of Ray, on two nodes of a cluster."""

import socket
import threading
import time

import pytest

from benchmarks.ray_nodes import nodes
from sagellm.comm_backend import config
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError
from sagellm.demo_model import ensure_demo_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy import ray_workers
from sagellm.engines.lmdeploy.engine import LMDeployEngine

# These warnings come from LMDeploy's and Ray's own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:DAGNode.execute"),
]
PROMPTS = [[5 + number] * (20 + number) for number in range(6)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SETTINGS = dict(model="demo", device="cpu", dtype="float32", kv_blocks=64, max_batch_size=8, threads=1)


def on_ray(address, **settings):
    return SageConfig(
        **SETTINGS | {"tensor_parallel": 2, "distributed_executor_backend": "ray", "ray_address": address} | settings
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ray_address": "auto"}, "ray_address auto needs distributed_executor_backend ray"),
        ({"distributed_executor_backend": "ray"}, "is for tensor_parallel above 1"),
        ({"distributed_executor_backend": "ray", "tensor_parallel": 2}, "needs ray_address"),
        (
            {"distributed_executor_backend": "ray", "tensor_parallel": 2, "ray_address": "head"},
            "ray_address is 'head'; give host:port",
        ),
        (
            {"distributed_executor_backend": "ray", "tensor_parallel": 2, "ray_address": f"127.0.0.1:{free_port()}"},
            "no Ray cluster answers at 127.0.0.1:",
        ),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        LMDeployEngine(SageConfig(**SETTINGS | settings))


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install it: pip install 'sagellm\[ray\]'"):
        ray_workers.check_ray(on_ray("auto"))


@pytest.mark.slow
def test_two_nodes_answer_as_one_process_does(monkeypatch):
    with LMDeployEngine(SageConfig(**SETTINGS)) as engine:
        expected = [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]
    draft = {"speculative": "draft", "speculative_options": {"model": str(ensure_demo_model())}}
    with nodes(2) as cluster:
        for settings in ({}, {"speculative": "suffix"}, draft, {"strategy": "slo_aware"}, {"comm_backend": "group"}):
            with LMDeployEngine(on_ray(cluster.address, **settings)) as engine:
                assert [each.token_ids for each in engine.generate(PROMPTS, GREEDY)] == expected, settings
                speculation = engine.hooks.report()["speculation"]
            assert ("speculative" in settings) == bool(speculation and speculation["accepted"])
        monkeypatch.setattr(ray_workers, "NODES_WAIT_S", 1.0)
        with pytest.raises(EngineError, match="has 2 of the resource sagellm, and 4 workers need one each: start nodes"):
            LMDeployEngine(on_ray(cluster.address, tensor_parallel=4))


@pytest.mark.slow
def test_a_node_is_killed():
    with nodes(2) as cluster:
        engine = LMDeployEngine(on_ray(cluster.address))
        engine.generate(PROMPTS, GREEDY)
        killer = threading.Timer(0.5, cluster.kill, [0])
        killer.start()
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"tensor-parallel worker 1 \(node 127.0.0.3\)"):
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=900, ignore_eos=True))
        took_s = time.monotonic() - start
        with pytest.raises(EngineError):
            engine.generate(PROMPTS, GREEDY)
        engine.close()
        killer.join()
        cluster.add()
        with LMDeployEngine(on_ray(cluster.address)) as again:
            assert len(again.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    assert took_s < 30  # no hang; the figure is a benchmark's
