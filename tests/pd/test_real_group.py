"""A proxy and real engines: their answers are those of one engine, whichever of them is killed, stalled or left."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sagellm.comm_backend.control import connect, new_key
from sagellm.comm_backend.group_messages import Connect, Done, Fetch, Held
from sagellm.comm_backend.kv_transfer.base import TransferOptions
from sagellm.comm_backend.kv_transfer.layout import KVRegion
from sagellm.comm_backend.kv_transfer.shared_memory import memory_of
from sagellm.core.errors import PeerError
from tests.pd.harness import until
from tests.pd.held_channel import HeldShm
from tests.pd.impostor import Impostor
from tests.pd.real_group import (
    TIMEOUT_S,
    RealGroup,
    Stream,
    body_of,
    chat_of,
    choice_tokens,
    run,
    streamed_by,
    tokens_of,
)

pytestmark = pytest.mark.slow  # `test_up.py` has a whole group, and `tests/engines/lmdeploy/pd` pairs of engines

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
NAMES = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def started(tmp_path_factory, model_folder):
    group = RealGroup(tmp_path_factory.mktemp("group"), model_folder("llama"))
    try:
        yield group.ready()
        group.end()
    finally:
        group.close()


@pytest.fixture
def group(started):
    """Whole again before each test, and every block accounted for after it."""
    until("the group is whole", started.is_whole, 60)
    yield started
    until("both engines are idle", started.is_idle, 10)


WAYS = {
    "greedy": (COMPLETION, {}),
    "one token": (COMPLETION, {"max_tokens": 1}),
    "seed": (COMPLETION, {"temperature": 1.2, "top_p": 0.9, "seed": 7}),
    "penalty": (COMPLETION, {"repetition_penalty": 1.4}),
    "logprobs": (COMPLETION, {"logprobs": 2}),
    "chat": (CHAT, {}),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3}),
    "at least": (CHAT, {"min_new_tokens": 6, "temperature": 1.0, "seed": 3}),
    "guided": (CHAT, {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {
        "name": "names", "strict": True, "schema": NAMES}}}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_engine(group, prompt, way):
    path, fields = WAYS[way]
    body = (body_of(prompt, 12) if path is COMPLETION else chat_of(prompt)) | fields
    before = group.arrived()
    found = group.http.post(path, json=body)
    streamed = streamed_by(group.http, path, body)
    expected = group.single(path, body)
    assert found.status_code == expected.status_code == 200, (found.text, expected.text)
    theirs = expected.json()
    _equal(found.json()["choices"], theirs["choices"])
    assert found.json()["usage"] == theirs["usage"]
    assert streamed == (choice_tokens(theirs["choices"][0]), theirs["choices"][0]["finish_reason"])
    assert group.arrived() == before + 2, "it was not split"
    if way == "guided":
        assert theirs["choices"][0]["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("place", [0, 3])
def test_stop_words(group, prompt, place):
    """Also one that is the very first of the answer, which the prefill engine has drawn."""
    whole = group.single(COMPLETION, body_of(prompt, 8)).json()["choices"][0]["text"]
    body = body_of(prompt, 8, stop=[whole[place]], ignore_eos=False)
    found = group.http.post(COMPLETION, json=body).json()["choices"][0]
    _equal(found, group.single(COMPLETION, body).json()["choices"][0])
    assert found["finish_reason"] == "stop" and len(found["text"]) <= place


def test_a_client_that_leaves(group, prompt):
    """In the middle of its stream, and while its keys and values are on their way: neither engine works on."""
    stream = Stream(group, prompt, 1500).begun()
    stream.leave()
    until("both engines are idle", group.is_idle, 10)
    assert not stream.is_done
    late = group.arrived("failed_timeout")
    with group.held() as waits:
        stream = Stream(group, prompt + "again", 1500)
        waits()
        stream.leave()
        until("both engines are idle", group.is_idle, 20)
    assert group.arrived("failed_timeout") == late, "its end was the deadline's"
    assert tokens_of(group.complete(prompt)) == group.expected(prompt)


def test_a_transfer_that_stalls(group, prompt):
    before = group.arrived("failed_timeout")
    with group.held():
        begun = time.monotonic()
        found = tokens_of(group.complete(prompt))
        assert time.monotonic() - begun >= TIMEOUT_S
        assert group.arrived("failed_timeout") == before + 1
    assert found == group.expected(prompt)


def test_a_prefill_engine_that_hangs(group, prompt):
    """It is stopped before the prompt comes: nothing ends its connections."""
    engine = group.engine("prefill")
    engine.send_signal(signal.SIGSTOP)
    try:
        found = tokens_of(group.complete(prompt))
    finally:
        engine.send_signal(signal.SIGCONT)
    assert found == group.expected(prompt)


def test_a_prefill_engine_killed_before_during_and_after_its_transfers(group, prompt):
    before, during, after, late = (f"{name} {prompt}" for name in ("before", "during", "after", "late"))
    expected = {each: group.expected(each) for each in (before, during, late)}
    engine, server = group.engine("prefill"), group.server("prefill")
    arrived = group.arrived(), group.arrived("failed_peer") + group.arrived("failed_transfer")
    too_late = group.arrived("failed_timeout"), group.arrived("failed_expired")
    with ThreadPoolExecutor(2) as pool, group.held() as waits:
        (group.folder / "hold").unlink()
        stream = Stream(group, after, 2000).begun()
        until("its transfer is through", lambda: group.arrived() > arrived[0])
        (group.folder / "hold").touch()
        answers = {during: pool.submit(group.complete, during)}
        waits()
        engine.send_signal(signal.SIGSTOP)  # what comes now is not computed any more
        answers[before] = pool.submit(group.complete, before)
        until("two requests wait", lambda: group.arriving() == 2)
        assert stream.is_running
        server.kill()
        engine.kill()
        for each, answer in answers.items():
            assert tokens_of(answer.result(30)) == expected[each]
    assert tokens_of(group.complete(late)) == expected[late]  # no other engine is there to compute it
    stream.end()
    assert stream.is_done and not stream.error
    assert group.arrived("failed_peer") + group.arrived("failed_transfer") >= arrived[1] + 2
    found = group.arrived("failed_timeout"), group.arrived("failed_expired")
    assert found == too_late, "the deadline was noticed, not the death"
    until("the group is whole", group.is_whole, 60)
    done = group.arrived()
    assert tokens_of(group.complete("new " + prompt)) == group.expected("new " + prompt)
    assert group.arrived() == done + 1, "the new prefill engine is not used"
    assert stream.tokens == group.expected(after, 2000)


def test_a_decode_engine_killed_mid_stream(group, prompt):
    expected = group.expected("whole " + prompt, 20)
    retries = group.metric(group.url, "sagellm_gateway_retries_total")
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(group, prompt, 4000).begun()
        with group.held() as waits:
            whole = pool.submit(group.complete, "whole " + prompt, 20)
            waits()
            assert group.metric(group.prefill, "sagellm_pd_running", side="offers") == 1
            assert stream.is_running
            group.engine("decode").kill()
            held = lambda: group.metric(group.prefill, "sagellm_kv_blocks", state="active")  # noqa: E731
            until("blocks that were kept for it are free", lambda: not held(), 10)
        stream.end()
        assert "failed in the middle of this answer" in stream.error and "send the request again" in stream.error
        assert not stream.is_done and not stream.broken and "Traceback" not in stream.error
        assert tokens_of(whole.result(90)) == expected  # nothing of it was shown: it waits for the new engine
        assert group.metric(group.url, "sagellm_gateway_retries_total") > retries
    until("the group is whole", group.is_whole, 60)
    assert stream.tokens == group.expected(prompt, len(stream.tokens))


# ---- peers that do not fit, and what is asked wrongly


def of_weights(facts):
    return facts.model_copy(update={"weights": "others"})


def of_layers(facts):
    (endpoint,) = facts.endpoints
    layout = endpoint.layout.model_copy(update={"num_layers": endpoint.layout.num_layers + 1})
    return facts.model_copy(update={"endpoints": (endpoint.model_copy(update={"layout": layout}),)})


def of_dtype(facts):
    (endpoint,) = facts.endpoints
    parts = tuple(part.model_copy(update={"dtype": "bfloat16"}) for part in endpoint.layout.parts)
    layout = endpoint.layout.model_copy(update={"parts": parts})
    return facts.model_copy(update={"endpoints": (endpoint.model_copy(update={"layout": layout}),)})


def half_written(facts):
    """Real memory of this process, whose header has not been written."""
    (endpoint,) = facts.endpoints
    layout = endpoint.layout
    tensors = tuple(HeldShm.empty(layout.shape(part), torch.float32) for part in layout.parts)
    for tensor in tensors:
        memory, _ = memory_of(tensor)
        memory[:24] = bytes(24)
    channel = HeldShm(KVRegion(layout, tensors), TransferOptions(options={"folder": "/"}))
    KEPT.append(channel)
    return facts.model_copy(update={"endpoints": (channel.endpoint(),)})


def not_there(facts):
    (endpoint,) = facts.endpoints
    address = {**endpoint.address, "pid": 2**22 + 1}  # beyond the kernel's largest
    return facts.model_copy(update={"endpoints": (endpoint.model_copy(update={"address": address}),)})


KEPT: list[HeldShm] = []


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (of_weights, "other weights (others)"), (of_layers, "layers"), (of_dtype, "bfloat16"), (half_written, "half-written"),
        (not_there, "has gone"),
    ],
)  # fmt: skip
def test_a_peer_that_does_not_fit(group, prompt, forge, says):
    """It is refused when they are to be connected, the status says why, and the others go on."""
    with Impostor(group.key, run(group.facts(group.prefill)), forge) as peer:
        assert group.signed("POST", "/nodes/add", {"url": peer.url}).status_code == 200
        words = until("a refusal", lambda: group.status()[group.decode]["refused"].get(peer.url))
        assert group.status()[group.decode]["connected"] == [group.prefill]
        assert says in words and words.endswith(".") and "Traceback" not in words and len(words) < 400
        assert tokens_of(group.complete(prompt)) == group.expected(prompt)
        group.signed("POST", "/nodes/remove", {"url": peer.url})
        assert not group.status()[group.decode]["refused"]
    while KEPT:
        KEPT.pop().close()


def test_what_engines_are_asked_wrongly(group):
    async def ask(url, message, reply, key=group.key):
        connection = await connect(group.control(url), key)
        try:
            return await connection.call(message, 20, reply)
        finally:
            await connection.close()

    unknown = Fetch(transfer_id=12345, timeout_s=0.3)
    with pytest.raises(PeerError, match=r"transfer 12345: the prompt was not computed within 0.3 s\."):
        run(ask(group.prefill, unknown, Held))
    nobody = Connect(engine_id="http://127.0.0.1:9", address="127.0.0.1:9")
    with pytest.raises(PeerError, match=r"cannot connect to 127.0.0.1:9: Connection refused\."):
        run(ask(group.decode, nobody, Done))
    another = Connect(engine_id="http://127.0.0.1:9", address=group.control(group.prefill))
    with pytest.raises(PeerError, match=f"there is {group.prefill}, not http://127.0.0.1:9"):
        run(ask(group.decode, another, Done))
    with pytest.raises(PeerError, match="key"):
        run(ask(group.decode, nobody, Done, new_key()))


def _equal(ours, theirs, where="answer"):
    """But for rounding, and for the text (`tokens_of`)."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours.keys() - {"text", "content"}:
            _equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            _equal(*pair, f"{where}.{place}")
    else:
        assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(ours, float) else theirs), where
