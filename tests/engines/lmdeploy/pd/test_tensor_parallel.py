"""Prompts from an engine with two worker processes, and for one: each rank reads and is read by itself."""

import asyncio

import pytest

from tests.engines.lmdeploy.guesses import tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, Pair, one, wait_until
from tests.pool import settle
from tests.reference import make_prompts

# A worker that dies can leave its parent waiting for it.
pytestmark = pytest.mark.timeout(120)

LENGTHS = (1, 15, 16, 17, 100, 200)
TROUBLED = "tests.engines.lmdeploy.pd.test_workers:TroubledShm"


@pytest.mark.slow
def test_prompts_of_two_workers(start_engine, tmp_path, reference):
    prompts = make_prompts(LENGTHS)
    engines = Pair(
        start_engine, tmp_path, prefill={"checksums": True}, tensor_parallel=2,
        decode_config={"tensor_parallel": 1, "block_size": 32, "kv_blocks": 40},
    )  # fmt: skip
    facts = engines.prefill.hooks.pd.facts()
    assert len(facts.endpoints) == 2 and facts.token_bytes == engines.decode.hooks.pd.facts().token_bytes
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"first_tokens": 6, "done": 6}
    assert engines.report()["bytes"] == sum(map(len, prompts)) * facts.token_bytes
    assert engines.report("prefill")["offers"] == {"offered": 6, "read": 6}


@pytest.mark.slow
def test_prompts_for_two_workers(start_engine, tmp_path, reference):
    folder = {"channel": TROUBLED, "channel_options": {"folder": str(tmp_path)}}
    prompts = make_prompts(LENGTHS, seed=3)
    engines = Pair(start_engine, tmp_path, prefill=folder, decode=folder, decode_config={"tensor_parallel": 2})
    assert tokens_of(engines.ask(prompts)) == reference(prompts, NEW)
    assert engines.report()["arrivals"] == {"first_tokens": 6, "done": 6}
    # One of them cannot: half of the heads have come, and the prompt is computed here.
    (tmp_path / "fail1").touch()
    failing = make_prompts((60, 90), seed=4)
    assert tokens_of(engines.ask(failing)) == reference(failing, NEW)
    assert engines.report()["arrivals"]["failed_transfer"] == 2
    assert engines.report("prefill")["held"] == 0
    (tmp_path / "fail1").unlink()
    # A request leaves while both of them wait in the middle: its blocks come back when they have stopped.
    (tmp_path / "hold").touch()
    answer = asyncio.run_coroutine_threadsafe(
        one(engines.decode, failing[0][::-1], {}, 5, engines.of_prefill.engine_id, False), engines.decode._loop
    )
    engines.prefill._on_loop(one(engines.prefill, failing[0][::-1], {}, 5, engines.of_decode.engine_id, True))
    wait_until((tmp_path / "began").exists)
    answer.cancel()
    wait_until(lambda: not engines.report()["arriving"])
    settle(engines.decode)
    assert engines.report()["channel"]["cancelled"] == 1
    settle(engines.prefill)
    (tmp_path / "hold").unlink()
    again = make_prompts((70,), seed=5)
    assert tokens_of(engines.ask(again)) == reference(again, NEW)
    assert engines.report()["arrivals"]["done"] == 7
