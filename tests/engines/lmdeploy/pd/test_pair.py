"""Prompts computed by one engine and decoded by another: the answers are those of one, however the two are set up."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS

from sagellm.core.errors import PeerError, TransferError
from sagellm.core.ports import free_ports
from sagellm.engines.lmdeploy.pd.workers import options_of
from tests.engines.lmdeploy.guesses import ask, tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, wait_until
from tests.reference import make_prompts

LENGTHS = (1, 2, 15, 16, 17, 40, 100, 200)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_greedy_equals_transformers(pair, reference, prefix_caching, channel):
    prompts = make_prompts(LENGTHS)
    prompts += [prompts[-1][:150] + prompts[-2][:30]]  # its beginning is cached on both sides by then
    engines = pair(prefill={"channel": channel}, decode={"channel": channel}, prefix_caching=prefix_caching)
    for _ in range(2):
        assert tokens_of(engines.ask(prompts[:-1])) == reference(prompts[:-1], NEW)
        assert tokens_of(engines.ask(prompts[-1:])) == reference(prompts[-1:], NEW)
    report = engines.report()
    assert report["arrivals"] == {"first_tokens": 18, "done": 18}
    assert engines.report("prefill")["offers"] == {"offered": 18, "read": 18}
    arrivals = engines.decode.hooks.pd.arrivals
    assert len(arrivals.decoded_s) == 18 and not arrivals._joined
    for all_s, step_s, waited_s in zip(arrivals.decoded_s, arrivals.step_s, arrivals.waited_s, strict=True):
        assert all_s == pytest.approx(step_s + waited_s) and step_s > 0
    assert min(arrivals.decoded_s) > min(arrivals.joined_s) > 0 and report["decoded_s"]["0.5"] > report["joined_s"]["0.5"]
    token_bytes = engines.decode.hooks.pd.facts().token_bytes
    whole = 2 * sum(len(prompt) for prompt in prompts) * token_bytes
    assert MIGRATION_BACKENDS.module_dict[f"sage-{channel}"].options == options_of(engines.of_decode), "they have a new key"
    assert report["bytes"] == whole if not prefix_caching else 0 < report["bytes"] < 0.6 * whole


def test_other_ways_to_answer(pair, start_engine):
    """Everything that the first token needs beside itself is as in one engine."""
    prompts = make_prompts((30, 33, 50, 64, 90), seed=4)
    ways = [
        dict(top_k=0, temperature=1.3, random_seed=5), dict(logprobs=2),
        dict(repetition_penalty=1.3, temperature=0.9, top_k=5, random_seed=9), dict(max_new_tokens=1),
        dict(min_p=0.1, top_p=0.8, top_k=0, temperature=1.0, random_seed=3),
    ]  # fmt: skip
    single = start_engine()
    expected = ask(single, prompts, [dict(max_new_tokens=NEW) | way for way in ways])
    first = expected[0][0][0]
    stopping = ask(single, prompts[:1], [dict(ways[0], max_new_tokens=NEW, ignore_eos=False, stop_token_ids=[first])])
    single.close()
    engines = pair()
    found = engines.ask(prompts, ways)
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found[1][1], expected[1][1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert engines.report()["arrivals"] == {"first_tokens": 3, "done": 5}
    again = engines.ask(prompts[:1], [dict(ways[0], ignore_eos=False, stop_token_ids=[first])])
    assert tokens_of(again) == tokens_of(stopping)


def test_many_at_once_in_small_pools(pair, reference):
    """Requests wait for room, lose their place and are computed again."""
    prompts = make_prompts([20 + 13 * (number % 9) for number in range(30)], seed=7)
    engines = pair(kv_blocks=26)
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"]["done"] == 30


def test_beside_requests_that_stay(pair, reference):
    prompts = make_prompts((60, 70, 80, 90), seed=2)
    engines = pair()
    staying = asyncio.run_coroutine_threadsafe(
        engines.decode._generate(prompts, [_params()] * 4, [0.0] * 4), engines.decode._loop
    )
    moved = make_prompts((61, 71, 81, 91), seed=3)
    assert tokens_of(engines.ask(moved)) == reference(moved, NEW)
    assert [each.token_ids for each in staying.result(60)] == reference(prompts, NEW)


def test_with_guesses(pair, reference):
    prompts = make_prompts((60, 90), seed=6)
    engines = pair(decode_config={"speculative": "ngram"})
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"]["done"] == 2


def test_engines_that_do_not_fit(pair):
    engines = pair(decode_config={"model": "qwen2"}, connect=False)
    with pytest.raises(PeerError, match="other weights"):
        engines.connect()
    engines = pair(decode={"channel": "tcp"}, connect=False)
    with pytest.raises(PeerError, match="by shm, this engine by tcp|by tcp.*by shm"):
        engines.connect()


def test_connected_as_lmdeploys_proxy_does(pair, reference):
    from lmdeploy.pytorch.disagg.conn.protocol import (
        DistServeConnectionRequest,
        DistServeEngineEndpointInfo,
        MigrationProtocol,
    )

    (port,) = free_ports(1)
    engines = pair(connect=False, prefill={"engine_id": f"http://127.0.0.1:{port}"})
    where = DistServeEngineEndpointInfo(zmq_address=f"tcp://{engines.prefill.hooks.pd._address}")
    request = DistServeConnectionRequest(
        protocol=MigrationProtocol.TCP, remote_engine_id=engines.of_prefill.engine_id, remote_engine_endpoint_info=where,
        remote_kvtransfer_endpoint_info=[],
    )  # fmt: skip
    engines.decode._loop.call_soon_threadsafe(engines.decode.engine.p2p_connect, request)
    wait_until(lambda: engines.report()["peers"])
    prompts = make_prompts((40,))
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"]["done"] == 1

    # Later it does not connect them again, wherever the prefill engine has come back: its server says where.
    peers = engines.decode.hooks.pd._peers
    engines.decode._on_loop(peers.drop(engines.of_prefill.engine_id))
    again = make_prompts((50,), seed=2)
    assert tokens_of(engines.ask(again, to_prefill=False)) == reference(again, NEW)
    assert engines.report()["arrivals"]["failed_peer"] == 1, "nobody answers there"
    own = engines.prefill.hooks.pd
    info = {"engine_id": engines.of_prefill.engine_id, "role": "prefill", "control": own._address, "model": ""}
    with answering(port, info):
        assert tokens_of(engines.ask(again)) == reference(again, NEW)
    assert engines.report()["arrivals"]["done"] == 2


@contextlib.contextmanager
def answering(port, document):
    """A server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_block_sizes_differ(pair, reference):
    prompts = make_prompts((15, 33, 100), seed=8)
    engines = pair(decode_config={"block_size": 32, "kv_blocks": 40})
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"]["done"] == 3


@pytest.mark.parametrize("schema", ["fp8", "int8", "int4"])
def test_keys_and_values_of_few_bits(pair, start_engine, schema):
    prompts = make_prompts((1, 15, 17, 33, 100), seed=8)
    expected = [one.token_ids for one in start_engine(kv_schema=schema).generate(prompts, [_params()] * len(prompts))]
    engines = pair(kv_schema=schema, decode_config={"block_size": 32, "kv_blocks": 40})
    found = tokens_of(engines.ask(prompts))
    assert found == [one[:NEW] for one in expected]
    assert engines.report()["arrivals"]["done"] == len(prompts)


def test_schemas_that_differ_are_refused(pair):
    engines = pair(decode_config={"kv_schema": "int8"}, prefill_config={"kv_schema": "fp8"}, connect=False)
    with pytest.raises(TransferError, match="the layouts differ in dtype of keys.*the same model and KV schema"):
        engines.connect()


def test_checksums(pair, reference):
    prompts = make_prompts((15, 33, 100), seed=8)
    engines = pair(prefill={"checksums": True}, decode={"checksums": True})
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"]["done"] == 3
    pd = engines.prefill.hooks.pd

    async def wrong(blocks):
        return (tuple(1 for _ in blocks),)

    pd.offers._checksums = wrong
    again = make_prompts((60,), seed=11)
    assert tokens_of(engines.ask(again)) == reference(again, NEW)
    assert engines.report()["arrivals"]["failed_transfer"] == 1


def _params():
    from sagellm.engines.base import SamplingParams

    return SamplingParams(max_new_tokens=NEW, ignore_eos=True)
