"""Prompts computed by one engine and decoded by another: what becomes of answers and blocks, whatever goes wrong."""

import asyncio
import time

import pytest

from sagellm.comm_backend.group_messages import Release, Released
from sagellm.core.errors import TransferError
from tests.engines.lmdeploy.guesses import tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, one, wait_until
from tests.pool import settle
from tests.reference import make_prompts


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
    """Waiting prompts are computed as soon as there is room, whatever has made the room. No timer looks for room."""
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
    """Blocks that were read count only if their owner still held them."""
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
            tensor[:, list(plan.target_blocks[::2])] = 7.0
        await asyncio.sleep(0.05)
        raise TransferError("planted")

    engines.decode.hooks.pd.arrivals._transfer = fail
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"first_tokens": 2, "failed_transfer": 2}


def test_a_request_that_leaves_while_its_blocks_come(pair):
    """The transfer writes into the request's blocks until it has ended. Until then, no other request gets them."""
    engines = pair()
    pd, begun = engines.decode.hooks.pd, []
    allocator = engines.decode.engine.scheduler.block_manager.allocator

    async def slow(plan):
        before = allocator.get_ref_count(_logical(allocator, plan.target_blocks)).tolist()
        begun.append(before)
        end_s = time.monotonic() + 10
        while (now := allocator.get_ref_count(_logical(allocator, plan.target_blocks)).tolist()) == before:
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
    # The copy for this answer comes late: no request wants its blocks, so they are not kept.
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
    wait_until(lambda: engines.report("prefill")["offers"].get("offered"))
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
