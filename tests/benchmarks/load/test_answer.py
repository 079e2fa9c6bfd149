"""Events are counted alike however the network cuts them and whichever way they are read."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.answer import AnswerError, GenerateAnswer, OpenAiAnswer

TRAP = '", "completion_tokens": 999, "finish_reason": null, "text": "'  # text that looks like fields


def generate_event(so_far, text="a", finish=None):
    meta = {"prompt_tokens": 9, "completion_tokens": so_far, "finish_reason": finish and {"type": finish}}
    return {"text": text, "output_ids": [], "meta_info": meta, "routed_experts": None}


def completions_event(text, finish=None, usage=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


def chat_event(text, finish=None, usage=None, name="content"):
    delta = {"role": "assistant", name: text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def usage(tokens):
    return {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}


def stream(*events, done=True, separators=None):
    lines = [f"data: {json.dumps(event, separators=separators)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def read(answer, data, cuts=()):
    """One piece a second, cut at `cuts`."""
    places = [0, *sorted(cuts), len(data)]
    for arrived_s, (start, stop) in enumerate(pairwise(places)):
        answer.feed(float(arrived_s), data[start:stop])
    answer.end()
    return answer


EVENTS = [generate_event(1), generate_event(1, ""), generate_event(4, TRAP), generate_event(5, "é\n"),
          generate_event(5, "", "length")]  # fmt: skip


@pytest.mark.parametrize("separators", [None, (",", ":"), (" , ", " : ")])
def test_generate_counts_exactly(separators):
    answer = read(GenerateAnswer(), stream(*EVENTS, separators=separators))
    assert answer.chunks() == ([0.0] * 3, [1, 3, 1])
    assert (answer.prompt_tokens, answer.output_tokens) == (9, 5)


@given(st.lists(st.integers(0, len(stream(*EVENTS))), max_size=8))
def test_cuts_move_times_only(cuts):
    data = stream(*EVENTS)
    answer = read(GenerateAnswer(), data, cuts)
    times, counts = answer.chunks()
    assert counts == [1, 3, 1]
    ends = [len(stream(*EVENTS[: index + 1], done=False)) - 1 for index in (0, 2, 3)]  # the line is whole here
    assert times == [sum(cut < end for cut in cuts) for end in ends]


def test_usage_goes_to_the_last_event_with_text():
    events = [chat_event(""), chat_event("a"), chat_event(TRAP), chat_event("", "stop", usage(7))]
    answer = read(OpenAiAnswer(), stream(*events))
    assert answer.chunks() == ([0.0, 0.0], [1, 6])
    assert (answer.prompt_tokens, answer.output_tokens) == (9, 7)


@pytest.mark.parametrize("separators", [None, (",", ":"), (" , ", " : ")])
def test_openai_events_of_all_kinds(separators):
    last = {"choices": [], "usage": usage(4)}
    for events in (
        [completions_event("a"), completions_event('"'), completions_event("b"), completions_event("c", "length"),
         last],
        [chat_event("a"), chat_event("b", name="reasoning_content"), chat_event(None), chat_event("c"), chat_event("d"),
         {"choices": [{"delta": {}, "finish_reason": "stop"}]}, last],
    ):  # fmt: skip
        answer = read(OpenAiAnswer(), stream(*events, separators=separators))
        assert answer.chunks()[1] == [1, 1, 1, 1]


def test_without_usage_events_are_tokens():
    answer = read(OpenAiAnswer(), stream(completions_event("a"), completions_event("b", "stop")))
    assert (answer.output_tokens, answer.prompt_tokens) == (2, 0)


def test_more_events_than_tokens_keeps_first_and_last():
    events = [completions_event(text) for text in "abcde"] + [completions_event("", "stop", usage(3))]
    data = stream(*events)
    starts = [len(stream(*events[:index], done=False)) for index in range(1, 6)]
    answer = read(OpenAiAnswer(), data, starts)
    assert answer.chunks() == ([0.0, 1.0, 4.0], [1, 1, 1])


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (GenerateAnswer, stream(generate_event(1), done=False), "ended early"),
        (GenerateAnswer, stream(generate_event(1)), "finish_reason is None"),
        (GenerateAnswer, stream(generate_event(1, "sorry", "error")), "finish_reason is 'error'; whole answers"),
        (GenerateAnswer, stream(generate_event(0, "", "stop")), "no token"),
        (GenerateAnswer, stream({"object": "error", "message": "no blocks"}), "error in the stream: .*no blocks"),
        (OpenAiAnswer, stream({"error": {"message": "out of blocks"}}), "error in the stream: .*out of blocks"),
        (GenerateAnswer, stream({"finish_reason": None}), "not an answer of this endpoint"),
        (OpenAiAnswer, stream(generate_event(1, "", "stop")), "not an answer of this endpoint"),
        (OpenAiAnswer, b"data: nonsense\n\n", "not an answer of this endpoint: nonsense"),
        (OpenAiAnswer, b"data: [1]\n\n", "not an answer of this endpoint"),
        (OpenAiAnswer, b"data: \xff\n\n", "not an answer of this endpoint"),
    ],
)
def test_what_is_no_whole_answer(kind, data, message):
    with pytest.raises(AnswerError, match=message):
        read(kind(), data)


def test_comments_and_carriage_returns_are_fine():
    data = b": ping\r\n\r\nevent: x\r\n" + stream(*EVENTS).replace(b"\n", b"\r\n")
    assert read(GenerateAnswer(), data).output_tokens == 5
