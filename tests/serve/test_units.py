"""Parts of the server that need no server."""

import asyncio
import logging
import multiprocessing
import os
import threading
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy.serve.openai.protocol import CompletionRequest

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.core.host import START_REFUSED
from sagellm.serve.generation import GuardedGeneration, StopStrings
from sagellm.serve.lifecycle import EngineWatch
from sagellm.serve.logs import ClientLeft
from sagellm.serve.metrics import MAX_REPORTED, _reported
from sagellm.serve.parameters import Refused, check_parameters
from sagellm.serve.prompts import Prompts, in_turn
from sagellm.serve.sot_workers import for_each_engine
from sagellm.serve.wishes import take_wishes

TEXT = st.text(alphabet="ab", max_size=30)
WORDS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(TEXT, max_size=8), WORDS, st.booleans())
def test_stop_strings_find_the_first_word_however_the_text_is_cut(pieces, words, keep):
    whole = "".join(pieces)
    stops, shown, found = StopStrings(words, keep), "", False
    for piece in pieces:
        text, found = stops.feed(piece)
        shown += text
        assert whole.startswith(shown)
        if found:
            break
    else:
        shown += stops.flush()
    first = min(((whole.find(word) + len(word), whole.find(word)) for word in words if word in whole), default=None)
    assert found == (first is not None)
    assert shown == (whole if first is None else whole[: first[0] if keep else first[1]])


class FakeEngine:
    """Yields what it is given; knows whether it was closed."""

    def __init__(self, *outputs):
        self._outputs, self.closed = outputs, False
        self.id2step, self.id2inst = {}, {}

    async def generate(self, messages, session_id, gen_config=None):
        self.id2step.setdefault(session_id, 0)
        try:
            for out in self._outputs:
                if isinstance(out, Exception):
                    raise out
                yield out
                await asyncio.sleep(0)
        finally:
            self.closed = True


def out(text, reason=None):
    return SimpleNamespace(response=text, finish_reason=reason, generate_token_len=1)


def collect(engine, on_dead=lambda: None, take=None):
    async def run():
        texts = []
        generator = GuardedGeneration(engine, on_dead)("x", 1)
        async for item in generator:
            texts.append(item.response)
            if len(texts) == take:
                break
        await generator.aclose()
        await asyncio.sleep(0.01)
        return texts

    return asyncio.run(run())


def test_outputs_pass_and_a_reader_that_leaves_closes_the_engine_side():
    engine = FakeEngine(out("a"), out("b"), out("", "stop"))
    assert collect(engine) == ["a", "b", ""] and engine.closed
    engine = FakeEngine(out("a"), out("b"), out("", "stop"))
    assert collect(engine, take=1) == ["a"] and engine.closed


def test_an_answer_that_begins_after_all_were_ended_ends_too():
    class Silent(FakeEngine):
        async def generate(self, *_, **__):
            await asyncio.Event().wait()  # as a call to a process that is dead
            yield

    async def run():
        generation = GuardedGeneration(Silent(), lambda: None)
        generation.end_all("the engine has stopped")
        with pytest.raises(HTTPException, match="the engine has stopped"):
            await asyncio.wait_for(anext(generation("x", 1)), 30)
        with pytest.raises(Refused, match="the engine has stopped"):
            await asyncio.wait_for(generation.run(asyncio.sleep(600), asyncio.sleep(600)), 30)
        await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("take", [None, 1])
def test_a_session_that_is_over_leaves_nothing(take):
    engine = FakeEngine(out("a"), out("", "stop"))
    collect(engine, take=take)
    assert engine.id2step == {}


def test_a_session_that_goes_on_keeps_its_step():
    engine = FakeEngine(out("a"))
    engine.id2step[1] = 5
    collect(engine)
    assert engine.id2step == {1: 5}
    engine = FakeEngine(out("a"))
    engine.id2inst[1] = "another request's"
    collect(engine)
    assert engine.id2step == {1: 0}


@pytest.mark.parametrize("num_turns", range(6))
def test_a_client_that_leaves_in_the_moment_of_a_token(num_turns):
    """LMDeploy's wait for a token drops the cancellation then; the request leaves the engine all the same."""
    come, more = asyncio.Event(), []

    class Waiting(FakeEngine):
        async def generate(self, messages, session_id, gen_config=None):
            try:
                while True:
                    await asyncio.wait_for(come.wait(), 1)
                    come.clear()
                    more.append(1)
                    yield out("a")
            finally:
                self.closed = True

    engine = Waiting()

    async def run():
        generator = GuardedGeneration(engine, lambda: None)("x", 1)
        come.set()
        await anext(generator)
        come.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await generator.aclose()
        await asyncio.sleep(0.05)
        assert engine.closed
        assert len(more) <= 2

    asyncio.run(run())


def test_an_error_of_the_engine_is_a_500_and_a_dead_one_is_told():
    told = []
    for status, dead in (("CANCEL", 0), ("HANDLER_NOT_EXIST", 1)):
        engine = FakeEngine(out(f"internal error happened, status code ResponseType.{status}", "error"))
        with pytest.raises(HTTPException) as caught:
            collect(engine, lambda: told.append(True))
        assert caught.value.status_code == 500 and len(told) == dead
    with pytest.raises(KeyError):
        collect(FakeEngine(out("a"), KeyError("x")))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[safe_run] exception caught: CancelledError ", False),
        ("[safe_run] exception caught: GeneratorExit ", False),
        ("[model_inst] exception caught: ", False),
        ("[safe_run] exception caught: RuntimeError out of blocks", True),
        ("something else", True),
    ],
)
def test_only_the_noise_of_leaving_clients_is_dropped(text, kept):
    record = logging.LogRecord("lmdeploy", logging.ERROR, "file", 1, text, None, None)
    assert ClientLeft().filter(record) is kept


class FakeLMDeploy:
    """A model of 1100 rows with a tokenizer that knows 1000 tokens, of which the longest has four letters."""

    backend = "pytorch"
    engine = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1100))
    backend_config = SimpleNamespace(num_gpu_blocks=0, block_size=64)
    session_len = 100_000

    def __init__(self):
        words = SimpleNamespace(get_vocab=lambda: {"a": 0, "abcd": 1})
        self.threads = []
        self.tokenizer = SimpleNamespace(model=SimpleNamespace(model=words), encode=self.encode)

    def encode(self, text, add_bos=True):
        self.threads.append(threading.current_thread())
        return [1] * (len(text) // 4)

    async def _get_prompt_input(self, messages, do_preprocess, sequence_start, adapter_name, **options):
        return {"input_ids": self.tokenizer.encode(messages, add_bos=sequence_start)}


def test_tokens_that_were_added_to_a_tokenizer_are_in_the_vocabulary():
    """`vocab_size` of a tokenizer leaves them out; chat templates of many models write nothing but such tokens."""
    prompts = Prompts(FakeLMDeploy())
    prompts.check_tokens([1005, 1099])
    with pytest.raises(Refused, match="between 0 and 1099"):
        prompts.check_tokens([1100])


@pytest.mark.parametrize("chat", [False, True])
def test_long_texts_are_tokenized_in_a_thread_and_endless_ones_never(chat):
    engine = FakeLMDeploy()
    prompts = Prompts(engine)

    def tokens(text):
        request = SimpleNamespace(prompt=text)
        if chat:
            options = dict(do_preprocess=True, tools=None, reasoning_effort=None, enable_thinking=None)
            request = SimpleNamespace(messages=text, **options)
        return asyncio.run(in_turn(len(text), prompts.tokens, request))

    assert len(tokens("abcd" * 1000)[0]) == 1000
    assert engine.threads.pop() is threading.main_thread()
    assert len(tokens("abcd" * 99_999)[0]) == 99_999
    assert engine.threads.pop() is not threading.main_thread()
    with pytest.raises(Refused, match="400001 characters; with a context of 100000"):
        tokens("a" * 400_001)
    assert not engine.threads


def test_the_end_of_the_engine_is_noticed_when_nobody_reads_the_log(monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=broken, flush=broken))
    told = threading.Event()
    watch = EngineWatch(lambda: None)
    # `finish`, or the watch would take this process for a stuck server and end it, with its children, seconds later.
    watch.on_death(lambda: (watch.finish(), told.set()))
    watch.report_dead_loop()
    assert told.wait(30)


def test_an_engine_that_ends_before_anybody_looks_is_noticed():
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(3,))
    told = threading.Event()
    watch = EngineWatch(lambda: None)
    watch.on_death(lambda: (watch.finish(), told.set()))
    process.start()
    process.join()
    assert multiprocessing.active_children() == []
    watch.watch(process)
    assert told.wait(30) and watch.reason == "the engine process ended with code 3"


def test_why_an_engine_refuses_to_start_is_said_and_is_code_2(monkeypatch, tmp_path, capsys):
    (tmp_path / START_REFUSED).write_text("plug-in x raised: TierError: disk tier /d is in use by process 7")
    codes = []
    ended = threading.Event()
    monkeypatch.setattr("sagellm.serve.lifecycle.end_children", lambda: None)
    monkeypatch.setattr("os._exit", lambda code: (codes.append(code), ended.set()))
    watch = EngineWatch(lambda: None, tmp_path)
    watch.report_dead_loop()
    assert ended.wait(30) and codes == [2]
    assert capsys.readouterr().err == "error: plug-in x raised: TierError: disk tier /d is in use by process 7\n"


def test_a_report_of_many_numbers_is_cut(caplog):
    report = {"mine": {"values": {str(number): number for number in range(3 * MAX_REPORTED)}}, "other": {"a": 1}}
    samples = _reported(report).samples
    assert len([one for one in samples if one.labels["plugin"] == "mine"]) == MAX_REPORTED
    assert samples[-1].labels == {"plugin": "other", "kind": "a", "key": ""}
    assert len(_reported(report).samples) == MAX_REPORTED + 1
    assert [record.message for record in caplog.records] == [
        f"plug-in mine reports more than {MAX_REPORTED} numbers; /metrics shows the first"
    ], "said once"


@pytest.mark.parametrize(("seed", "low"), [(5, 5), (2**32 + 5, 5), (-1, 2**32 - 1), (0, 2**32), (2**32, 2**32)])
def test_a_seed_counts_by_its_low_bits(seed, low):
    """0 would mean none."""
    assert take_wishes("/generate", {"seed": seed}, [[1]], 10) == [{"random_seed": low}]


def test_fields_of_a_template_are_those_that_it_reads():
    engine = FakeLMDeploy()
    fields = dict(do_preprocess=True, reasoning_effort=None, enable_thinking=False)
    request = SimpleNamespace(messages=[{"role": "assistant", "tool_calls": []}], **fields)
    with pytest.raises(Refused, match="enable_thinking is not read by the chat template"):
        Prompts(engine).tokens(request)
    template = "{{ messages[0].tool_calls }}{% if enable_thinking %}x{% endif %}"
    engine.chat_template = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
    engine.encode = lambda messages, add_bos: [1]
    engine.tokenizer.encode = engine.encode
    assert Prompts(engine).tokens(request) == [[1]]
    request.messages[0]["tool_call_id"] = "a"
    with pytest.raises(Refused, match=r"messages\[0\].tool_call_id is not a field"):
        Prompts(engine).tokens(request)


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
def test_a_prompt_alone_may_have_the_limits_of_its_client():
    """LMDeploy's proxy sets `max_tokens` to 1 for the engine that computes the prompt."""
    raw = {"model": "x", "prompt": "a", "max_tokens": 1, "max_completion_tokens": 9, "min_tokens": 5}
    check_parameters(CompletionRequest(**raw), raw | {"preserve_cache": True}, 10**6)
    with pytest.raises(Refused, match="max_tokens is 1 and max_completion_tokens is 9"):
        check_parameters(CompletionRequest(**raw), raw, 10**6)


def test_workers_of_skeleton_of_thought_need_the_cpu_device_and_share_the_cores():
    cores, config = len(os.sched_getaffinity(0)), SageConfig(sot_workers=1)
    assert for_each_engine(config, "cpu").threads == max(1, cores // 2)
    assert for_each_engine(config.model_copy(update={"threads": 1}), "cpu").threads == 1
    with pytest.raises(ConfigError, match="--sot-workers needs the CPU device; this is cuda"):
        for_each_engine(config, "cuda")
