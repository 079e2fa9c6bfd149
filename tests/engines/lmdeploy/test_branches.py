"""Branches of one request: the same tokens as alone, one prefill for all of them, and no block left behind."""

import asyncio
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from lmdeploy.pytorch.engine.engine_instance import EngineInstance

from sagellm.core.config import KVConfig
from sagellm.core.errors import EngineError
from sagellm.core.hooks import Phase, Plugin
from sagellm.core.running import MAX_BRANCHES, Request
from sagellm.core.service import ServiceRequest
from sagellm.engines.base import SamplingParams
from sagellm.replay.schedule.verify import verify_schedule
from sagellm.replay.verify import verify_log
from tests.engines.lmdeploy.test_chunks import chunked
from tests.pool import check_blocks, settle
from tests.sweeps import slow_but

NEW, WAIT_S = 12, 60
RANDOM = np.random.default_rng(7)
PROMPT = RANDOM.integers(3, 300, 75).tolist()  # four blocks of 16, and 11 tokens
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
MIXED = [
    SamplingParams(max_new_tokens=NEW, ignore_eos=True, temperature=float(number > 1), seed=number + 1) for number in range(5)
]
LOG = "tests.engines.lmdeploy.test_branches:Log"


class Log(Plugin):
    """Records the views that a strategy sees, and the steps."""

    def __init__(self) -> None:
        self.views, self.steps = [], []

    def schedule(self, view):
        self.views.append(view)

    def on_step_end(self, result):
        self.steps.append(result)

    def prompt_tokens(self):
        return sum(step.num_tokens for step in self.steps if step.phase is Phase.PREFILL)


def log_of(engine):
    settle(engine)
    return engine.hooks._host.plugins[0][1]


def start_and_fork(engine, prompts, params=GREEDY, own=GREEDY, prompt=PROMPT, cancel=False):
    """`start` and `fork` with nothing in between: the request is forked before any of its prompt is computed."""

    running = engine._running

    async def both():
        request = running._begin(Request(next(engine._sessions), prompt, own, running._watch))
        every = params if isinstance(params, list) else [params] * len(prompts)
        every = [replace(each, service=each.service or own.service) for each in every]
        branches = await running._fork(request, prompts, every)
        if cancel:
            request.cancel()
        return request, branches

    return engine._on_loop(both())


def alone(engine, branches):
    """The tokens of the same prompts, one after the other."""
    return [engine.generate([each.prompt], each.params)[0].token_ids for each in branches]


def tokens(generations):
    return [each.token_ids for each in generations]


@pytest.mark.parametrize("length", [75, 1, 9, 16, 17, 64, 65])
@pytest.mark.parametrize("caching", [True, False])
def test_branches_of_a_prompt_compute_its_last_token_alone(start_engine, caching, length):
    """Prompts have whole blocks or a part of one; some samples are seeded. The fork comes before the prompt is computed."""
    engine = start_engine(LOG, prefix_caching=caching)
    request, branches = start_and_fork(engine, [[]] * 5, MIXED, prompt=PROMPT[:length])
    found = tokens([*branches.join(WAIT_S), request.result(WAIT_S)])
    assert log_of(engine).prompt_tokens() == length + 5
    assert branches.usage == {
        "prompt_tokens": length, "completion_tokens": 5 * NEW, "total_tokens": length + 5 * NEW
    }  # fmt: skip
    assert found == alone(engine, [*branches, request])
    report = engine.hooks.report()["forks"]
    assert (report["branches"], report["shared_tokens"]) == (5, 5 * (length - 1))
    assert report["copied_blocks"] == (5 if (length - 1) % 16 else 0)


@pytest.mark.parametrize("caching", [True, False])
def test_without_copies_a_part_of_a_block_is_computed_again(start_engine, caching):
    engine = start_engine(LOG, prefix_caching=caching)
    engine.hooks.branches.may_copy = False
    _, branches = start_and_fork(engine, [[]] * 3)
    found = tokens(branches.join(WAIT_S))
    assert log_of(engine).prompt_tokens() == len(PROMPT) + 3 * (len(PROMPT) - 64)
    assert engine.hooks.report()["forks"] == {"branches": 3, "shared_tokens": 3 * 64, "copied_blocks": 0, "waiting": 0}
    assert found == alone(engine, branches)


@pytest.mark.parametrize("caching", [True, False])
def test_branches_of_an_answer_share_it_and_stream(start_engine, caching):
    """Prompts behind the parent's text so far, and a branch of a branch; the parent goes on."""
    engine = start_engine(LOG, prefix_caching=caching)
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    request = engine.start(PROMPT, long, keep=True)
    told = iter(request)
    [next(told) for _ in range(5)]
    branches = engine.fork(request, [[], PROMPT[:3], PROMPT[:40]], [GREEDY, long, GREEDY])
    found, number_of = [[], [], []], branches.num_shared
    nested = None
    for number, token in branches.stream():
        found[number].append(token)
        if nested is None:
            nested = engine.fork(branches[1], [PROMPT[5:9], []], GREEDY)
    assert tokens(branches.join(0)) == [tuple(each) for each in found]
    assert nested.join(WAIT_S) and len(request.result(WAIT_S).token_ids) == 100
    request.cancel()
    assert {each.group_id for each in (*branches, *nested)} == {request.request_id}
    computed = log_of(engine).prompt_tokens()
    extra = sum(len(each.prompt) - number_of for each in branches) + sum(len(each.prompt) for each in nested)
    assert computed < len(PROMPT) + extra + 8, "more than the prompts of the branches was computed"
    every = [request, *branches, *nested]
    assert [each.token_ids for each in every] == alone(engine, every)


@pytest.mark.parametrize(
    "settings",
    [
        dict(plugins=(chunked(tokens=20),)), dict(decode_round=4), dict(model="qwen2-window"), dict(kv_schema="int8"),
        dict(host_kv_blocks=64, kv=KVConfig(policy="lru"), kv_blocks=24), dict(speculative="ngram"),
    ],
    ids=["chunks", "rounds", "window", "int8", "host", "speculation"],
)  # fmt: skip
def test_branches_with_other_parts_of_the_engine(start_engine, settings):
    settings = dict(settings)
    engine = start_engine(*settings.pop("plugins", ()), **settings)
    _, branches = start_and_fork(engine, [[], [], PROMPT[:20]], MIXED[:3])
    found = tokens(branches.join(WAIT_S))
    assert engine.hooks.report()["forks"]["shared_tokens"] >= 3 * (len(PROMPT) - 1)
    assert found == alone(engine, branches)


@pytest.mark.parametrize("caching", [True, False])
def test_branches_that_do_not_fit_wait(start_engine, caching):
    """Sixteen blocks; each of nine requests needs nine, four of them common ones."""
    engine = start_engine(LOG, prefix_caching=caching, kv_blocks=16)
    long = SamplingParams(max_new_tokens=60, ignore_eos=True)
    request, branches = start_and_fork(engine, [[]] * 8, long, long)
    found = tokens([request.result(WAIT_S), *branches.join(WAIT_S)])
    assert engine.hooks.report()["preempted"] > 0
    assert len(set(found)) == 1 and found[:1] == alone(engine, [request])


def test_a_kept_request_is_forked_after_its_end(start_engine):
    engine = start_engine(LOG, prefix_caching=False)
    request = engine.start(PROMPT, GREEDY, keep=True)
    assert len(request.result(WAIT_S).token_ids) == NEW
    points = [[number, 4] for number in range(5, 9)]
    branches = engine.fork(request, points)
    assert branches.join(WAIT_S)
    request.cancel()
    assert request.state == "finished"
    assert log_of(engine).prompt_tokens() == len(PROMPT) + 4 * 3, "the last token of the answer, and two of each branch"
    assert [each.token_ids for each in branches] == alone(engine, branches)


def test_bad_forks_are_refused(start_engine):
    engine = start_engine(prefix_caching=False)
    long = SamplingParams(max_new_tokens=300, ignore_eos=True)
    request = engine.start(PROMPT, GREEDY, keep=True)
    for prompts, params, message in (
        ([], None, "fork got 0 prompts; allowed are 1 to 128"),
        ([[]] * (MAX_BRANCHES + 1), None, "fork got 129 prompts"),
        ([[], PROMPT * 20], None, "branch 1, with .* tokens of its parent, has 15.. tokens; allowed are 1 to"),
        ([[], []], [GREEDY], "fork got 1 params for 2 prompts"),
        ([[]], SamplingParams(service=ServiceRequest(deadline=1.0)), "has passed"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.fork(request, prompts, params)
    for prompt in ([], PROMPT * 20):
        with pytest.raises(EngineError, match="the prompt has .* tokens; allowed are 1 to"):
            engine.start(prompt)
    foreign = start_engine().start(PROMPT, GREEDY, keep=True)
    request.cancel()
    left, done = engine.start(PROMPT, long), engine.start(PROMPT, GREEDY)
    left.cancel()
    assert left.result(WAIT_S).finish_reason == "cancelled" and done.result(WAIT_S).finish_reason == "length"
    settle(engine)
    for ended, message in (
        (left, "request 1 is cancelled, and its blocks are gone.*keep=True"),
        (done, "request 2 is finished, and its blocks are gone.*keep=True"), (foreign, "request 0 is not of this engine"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=message):
            engine.fork(ended, [[]])
    foreign.cancel()
    with pytest.raises(TimeoutError, match="no result after 0 s"):
        waits = engine.start(PROMPT, long)
        waits.result(0)
    waits.cancel()


@pytest.mark.parametrize("caching", [True, False])
def test_who_is_cancelled_leaves_the_others(start_engine, caching):
    """The parent before its prompt is computed; the branch that takes its place; then all."""
    engine = start_engine(LOG, prefix_caching=caching)
    request, branches = start_and_fork(engine, [[]] * 4)
    request.cancel()
    branches[0].cancel()
    found = [each.result(WAIT_S).token_ids for each in branches[1:]]
    # At most each of the two was cancelled in the step of its prompt, and one of the others computes it once more.
    assert log_of(engine).prompt_tokens() <= 3 * len(PROMPT) + 2
    assert found == alone(engine, branches[1:])
    request, branches = start_and_fork(engine, [[]] * 2, cancel=True)
    assert len(branches.join(WAIT_S)) == 2
    request = engine.start(PROMPT, SamplingParams(max_new_tokens=300, ignore_eos=True))
    branches = engine.fork(request, [[1], [2]])
    next(branches.stream())
    branches.cancel()
    assert [each.finish_reason for each in branches.join(WAIT_S)] == ["cancelled"] * 2
    assert request.state != "cancelled"
    request.cancel()


def test_strategies_tenants_and_records_know_branches(start_engine, tmp_path):
    record = tmp_path / "record.jsonl"
    engine = start_engine(record=record, strategy="fair", kv=KVConfig(policy="lru", quotas={"guest": {"gpu": 10}}))
    own = SamplingParams(max_new_tokens=8, ignore_eos=True, service=ServiceRequest(tenant="guest"))
    _, branches = start_and_fork(engine, [[], [7]], own=own)
    branches.join(WAIT_S)
    assert all(each.params.service.tenant == "guest" for each in branches)
    settle(engine)
    engine.close()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    arrived = [(each["request"], each["tenant"], each.get("parent")) for each in lines if each["event"] == "arrive"]
    assert arrived == [(0, "guest", None), (1, "guest", 0), (2, "guest", 0)]
    groups = [each["groups"] for each in lines if "groups" in each]
    assert {request: group for each in groups for request, group in each.items()} == {"0": 0, "1": 0, "2": 0}, groups
    forks = [(each["request"], each["group"], each["shared"], each["copied"]) for each in lines if each["event"] == "fork"]
    assert forks == [(1, 0, 74, 1), (2, 0, 75, 1)]
    assert verify_log(record).agrees and verify_schedule(record).agrees


def test_views_have_the_group(start_engine):
    engine = start_engine(LOG)
    engine.generate([PROMPT], GREEDY)
    start_and_fork(engine, [[], []])[1].join(WAIT_S)
    seen = {(row.request_id, row.group_id) for view in log_of(engine).views for row in view.requests}
    assert {(0, None), (1, 1), (2, 1), (3, 1)} <= seen


def wander(engine, count, seed):
    """Random starts, forks, joins and cancellations in a pool that is too small for them. Returns requests that finished."""
    choose = random.Random(seed)
    open_, finished, num_done = [], [], 0
    while num_done < count:
        num_done += 1
        act = choose.random()
        running = [each for each in open_ if each.state == "running" or each.keep]
        # Draws are among three tokens. Among all 320, one draw in 100,000 lies so near to a border that rounding decides it.
        # Rounding differs between a prompt that is computed whole and the last token of a branch.
        params = SamplingParams(
            max_new_tokens=choose.randint(1, 30), ignore_eos=True, temperature=choose.choice([0.0, 1.0]), top_k=3,
            seed=choose.randint(1, 99),
        )  # fmt: skip
        if act < 0.1 or not running:
            prompt = PROMPT[: choose.randint(1, 75)]
            open_.append(engine.start(prompt, params, keep=choose.random() < 0.1))
        elif act < 0.5:
            prompts = [PROMPT[: choose.choice([0, 0, 1, 20])] for _ in range(choose.randint(1, 5))]
            try:
                open_.extend(engine.fork(choose.choice(running), prompts, params))
            except EngineError as error:
                assert "its blocks are gone" in str(error) or "allowed are 1 to" in str(error)
        elif act < 0.75:
            choose.choice(open_).cancel()
        else:
            choose.choice([each for each in open_ if not each.keep] or open_).result(WAIT_S)
        if num_done % 7 == 0:
            engine._on_loop(checked(engine))
        while len(open_) > 24 or (num_done == count and open_):
            each = open_.pop(0)
            each.cancel() if each.keep or choose.random() < 0.3 else each.result(WAIT_S)
            finished += [each] if each.state == "finished" else []
    return finished


async def checked(engine):
    await asyncio.sleep(0)
    check_blocks(engine.engine.scheduler)


@pytest.mark.parametrize(
    ("caching", "count"), slow_but([(True, 150), (False, 150), (True, 10_000)], (True, 150))
)
def test_random_forks_joins_and_cancellations_leave_no_block_behind(start_engine, caching, count):
    engine = start_engine(prefix_caching=caching, kv_blocks=20)
    finished = wander(engine, count, seed=count)
    settle(engine)
    branches = engine.hooks.branches
    assert not (branches._groups or branches._parked or branches._due or branches._copies)
    some = random.Random(1).sample(finished, min(len(finished), 40))
    assert len(some) > 20 and [each.token_ids for each in some] == alone(engine, some)


def test_a_second_cancellation_does_not_interrupt_the_end_of_a_request(start_engine, monkeypatch):
    """Its blocks would stay for ever."""
    engine = start_engine()
    end = EngineInstance.async_end

    async def end_late(instance, number):
        await asyncio.sleep(0.2)
        await end(instance, number)

    monkeypatch.setattr(EngineInstance, "async_end", end_late)
    request = engine.start(PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True), keep=True)
    next(iter(request))
    request.cancel()
    time.sleep(0.1)
    request.cancel()
    assert request.result(WAIT_S).finish_reason == "cancelled"
    settle(engine)


def test_a_branch_that_fails_ends_the_others(start_engine):
    engine = start_engine()
    long = SamplingParams(max_new_tokens=500, ignore_eos=True)
    for wait in (lambda branches: branches.join(WAIT_S), lambda branches: list(branches.stream())):
        _, branches = start_and_fork(engine, [[], []], long)
        branches[0].end("failed", "error", EngineError("the engine gave it up"))
        with pytest.raises(EngineError, match="gave it up"):
            wait(branches)
        assert branches[1].result(WAIT_S).finish_reason == "cancelled"
        with pytest.raises(EngineError, match="gave it up"):
            list(branches[0])
        branches.cancel()
