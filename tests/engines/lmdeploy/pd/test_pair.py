"""Prompts computed by one engine and decoded by another: answers, and what becomes of blocks whatever goes wrong."""

import asyncio
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS

from sagellm.core.errors import PeerError, TransferError
from sagellm.engines.lmdeploy.pd.workers import options_of
from sagellm.pd.messages import Release, Released
from sagellm.pd.ports import free_ports
from tests.engines.lmdeploy.pd.pair import NEW, Pair, one, wait_until
from tests.engines.lmdeploy.test_speculative import ask, tokens_of
from tests.pool import settle
from tests.reference import make_prompts

LENGTHS = (1, 2, 15, 16, 17, 40, 100, 200)


@pytest.fixture
def pair(start_engine, tmp_path):
    def start(**values):
        return Pair(start_engine, tmp_path, **values)

    return start


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
    """Whatever the first token needs beside itself is as in one engine."""
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


# ---- what goes wrong


def test_nobody_computes_the_prompt(pair, reference):
    """The prefill engine has never heard of it."""
    prompts = make_prompts((40,))
    engines = pair(decode={"timeout_s": 0.3})
    assert tokens_of(engines.ask(prompts, to_prefill=False)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"failed_expired": 1}
    wait_until(lambda: not engines.report("prefill")["held"])


def test_no_connection(pair, reference):
    prompts = make_prompts((40,))
    engines = pair(prefill={"lease_s": 0.5}, connect=False)
    assert tokens_of(_answers_of_decode(engines, prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"failed_peer": 1}
    wait_until(lambda: engines.report("prefill")["offers"] == {"expired": 1})  # its blocks come back by the lease alone
    settle(engines.prefill)


def _answers_of_decode(engines, prompts):
    """As `Pair.ask`, but the prefill engine keeps its blocks for longer than it takes."""
    copy = asyncio.run_coroutine_threadsafe(
        one(engines.prefill, prompts[0], {}, 77, engines.of_decode.engine_id, True), engines.prefill._loop
    )
    found = engines.decode._on_loop(engines._answers(prompts, [{}], [77]))
    copy.result(30)
    settle(engines.decode)
    return found


def test_prompts_that_wait_for_room_of_those_that_are_kept(pair):
    """They are computed as soon as there is some, whatever has made it: nobody looks again after a while."""
    engines = pair(prefill={"lease_s": 1000.0}, kv_blocks=26)
    prompts = make_prompts((120, 120, 120, 200, 120, 120, 60), seed=12)
    prefill = engines.prefill
    pd = prefill.hooks.pd

    def begin(number):
        peer = engines.of_decode.engine_id
        return asyncio.run_coroutine_threadsafe(one(prefill, prompts[number], {}, 500 + number, peer, True), prefill._loop)

    def release(number):
        async def on_loop():
            return pd.offers.release(500 + number)

        return prefill._on_loop(on_loop())

    def is_kept(number):
        offer = pd.offers._offers.get(500 + number)
        return offer is not None and offer.since_s

    copies = [begin(number) for number in range(3)]
    wait_until(lambda: all(map(is_kept, range(3))))
    copies += [begin(number) for number in (3, 4)]  # of 13 blocks and of 8, where two are left
    wait_until(lambda: prefill.engine.scheduler.num_waiting() == 2)
    copies[3].cancel()  # who is the first to wait leaves; it still takes one of those that are kept
    assert release(0)
    wait_until(lambda: is_kept(4))
    # A lease ends.
    copies.append(begin(5))
    wait_until(lambda: prefill.engine.scheduler.num_waiting() == 1)
    prefill._loop.call_soon_threadsafe(pd.offers._time, pd.offers._offers[501], 0.01, "its lease has ended")
    wait_until(lambda: is_kept(5))
    for number in (2, 4, 5):
        assert release(number)
    for copy in (*copies[:3], *copies[4:]):
        copy.result(30)
    settle(prefill)


def test_another_prompt(pair, reference):
    """Two tokenizers, say: keys and values of other tokens are of no use."""
    prompts, other = make_prompts((40,)), make_prompts((40,), seed=9)
    engines = pair()
    assert tokens_of(engines.ask(prompts, other=other)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"failed_transfer": 1}


@pytest.mark.parametrize("is_released", [True, False])
def test_blocks_that_were_not_kept(pair, reference, is_released):
    """What was read counts only if the owner still held it."""
    prompts = make_prompts((40,))
    engines = pair()

    async def release(connection, message):
        engines.prefill.hooks.pd.offers.release(message.transfer_id)
        return Released(was_held=is_released)

    handlers = engines.prefill.hooks.pd._server._connections
    for connection in handlers:
        connection._handlers[Release] = release
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"].get("failed_transfer", 0) == (not is_released)


def test_a_transfer_that_fails_in_the_middle(pair, reference):
    prompts = make_prompts((100, 60), seed=5)
    engines = pair()
    blocks = engines.decode.engine.executor.model_agent.cache_engine.full_gpu_cache

    async def fail(plan):
        for tensor in blocks:  # half of it is written, and wrong
            tensor[:, list(plan.dst_blocks[::2])] = 7.0
        await asyncio.sleep(0.05)
        raise TransferError("planted")

    engines.decode.hooks.pd.arrivals._transfer = fail
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"first_tokens": 2, "failed_transfer": 2}


def test_a_request_that_leaves_while_its_blocks_come(pair):
    """The transfer writes into its blocks until it has ended, whoever would have them next."""
    engines = pair()
    pd, begun = engines.decode.hooks.pd, []
    allocator = engines.decode.engine.scheduler.block_manager.allocator

    async def slow(plan):
        before = allocator.get_ref_count(_logical(allocator, plan.dst_blocks)).tolist()
        begun.append(before)
        end_s = time.monotonic() + 10
        while (now := allocator.get_ref_count(_logical(allocator, plan.dst_blocks)).tolist()) == before:
            assert time.monotonic() < end_s, "the request does not leave"
            await asyncio.sleep(0.01)
        begun.append(now)
        raise TransferError("cancelled, say")

    pd.arrivals._transfer = slow
    prompt = make_prompts((100,))[0]
    copy = asyncio.run_coroutine_threadsafe(
        one(engines.prefill, prompt, {}, 5, engines.of_decode.engine_id, True), engines.prefill._loop
    )
    answer = asyncio.run_coroutine_threadsafe(
        one(engines.decode, prompt, {}, 5, engines.of_prefill.engine_id, False), engines.decode._loop
    )
    wait_until(lambda: begun)
    answer.cancel()
    copy.result(30)
    wait_until(lambda: len(begun) == 2)
    assert set(begun[0]) == {2} and set(begun[1]) == {1}
    settle(engines.decode)
    settle(engines.prefill)
    wait_until(lambda: not engines.report()["arriving"])


def _logical(allocator, slots):
    import numpy as np

    return np.flatnonzero(np.isin(allocator._log_mem.phy_map, slots) & (allocator._log_mem.ref_count > 0))


def test_a_request_that_leaves_before_its_prompt_is_computed(pair):
    engines = pair()
    prompt = make_prompts((100,))[0]
    answer = asyncio.run_coroutine_threadsafe(
        one(engines.decode, prompt, {}, 6, engines.of_prefill.engine_id, False), engines.decode._loop
    )
    wait_until(lambda: engines.report()["arriving"])
    answer.cancel()
    settle(engines.decode)
    wait_until(lambda: not engines.report()["arriving"])
    wait_until(lambda: not engines.report("prefill")["held"])
    # Its copy comes late: nobody wants it, so it is not kept.
    copy = engines.prefill._on_loop(one(engines.prefill, prompt, {}, 6, engines.of_decode.engine_id, True))
    assert len(copy[0]) <= 1
    settle(engines.prefill)


def test_the_decode_engine_goes(pair):
    """Blocks that were kept for it come back at once, not when the lease ends."""
    engines = pair(prefill={"lease_s": 1000.0})
    prompt = make_prompts((100,))[0]

    async def never(plan):
        await asyncio.sleep(1000)

    engines.decode.hooks.pd.arrivals._transfer = never
    answer = asyncio.run_coroutine_threadsafe(
        one(engines.decode, prompt, {}, 8, engines.of_prefill.engine_id, False), engines.decode._loop
    )
    engines.prefill._on_loop(one(engines.prefill, prompt, {}, 8, engines.of_decode.engine_id, True))
    wait_until(lambda: engines.report("prefill")["held"])
    for peer in list(engines.decode.hooks.pd._peers._peers.values()):  # as the death of the process would
        engines.decode._loop.call_soon_threadsafe(peer.connection._writer.transport.abort)
    wait_until(lambda: not engines.report("prefill")["held"])
    assert engines.report("prefill")["offers"] == {"offered": 1, "reader_lost": 1}
    settle(engines.prefill)
    answer.cancel()
    for task in list(engines.decode.hooks.pd.arrivals._tasks.values()):
        engines.decode._loop.call_soon_threadsafe(task.cancel)
    settle(engines.decode)


def test_the_prefill_engine_goes(pair, reference):
    prompts = make_prompts((40,))
    engines = pair(decode={"timeout_s": 60.0})
    answer = asyncio.run_coroutine_threadsafe(
        one(engines.decode, prompts[0], {}, 9, engines.of_prefill.engine_id, False), engines.decode._loop
    )
    wait_until(lambda: engines.report("prefill")["held"])
    begin_s = time.monotonic()
    engines.prefill.close()
    assert [answer.result(30)[0]] == reference(prompts, NEW)
    assert time.monotonic() - begin_s < 20.0, "it waited for its deadline"
    assert engines.report()["arrivals"] == {"failed_peer": 1}
    settle(engines.decode)


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
