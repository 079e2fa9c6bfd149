"""A server whose workers are actors of Ray, on nodes of a cluster."""

import signal

import pytest

from benchmarks.ray_nodes import nodes
from tests.serve.harness import wait_until


@pytest.mark.slow
def test_a_node_is_killed_and_the_server_starts_again_on_another(launch):
    with nodes(2) as cluster:
        server = launch(
            "--tensor-parallel", 2, "--distributed-executor-backend", "ray", "--ray-address", cluster.address,
            "--restart-workers",
        ).ready()  # fmt: skip
        prompt = {"model": server.model, "prompt": "a b c", "max_tokens": 8, "temperature": 0}
        before = server.post("/v1/completions", prompt).json()["choices"][0]["text"]
        cluster.kill(0)
        cluster.add()
        wait_until("it is ready again", lambda: server.stdout.count('"ready": true') == 2)
        assert server.post("/v1/completions", prompt).json()["choices"][0]["text"] == before
        assert "tensor-parallel worker 1 (node 127.0.0.3)" in server.stderr
        server.end(signal.SIGTERM)
