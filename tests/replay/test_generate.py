"""Generated traces: equal for equal seeds, and of the shape that was asked for."""

from itertools import pairwise

import numpy as np
import pytest

from sagellm.core.errors import TraceError
from sagellm.replay.base import check_prefixes
from sagellm.replay.generate import GENERATORS, generate, is_generator
from sagellm.replay.generate.text import KeyCounter, Text


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator(name):
    trace = generate(f"{name}:requests=400,seed=3,block_size=32")
    again = generate(f"{name}:requests=400,seed=3,block_size=32")
    other = generate(f"{name}:requests=400,seed=4,block_size=32")
    assert trace.sha256 == again.sha256 != other.sha256
    assert trace.num_requests == 400 and trace.block_size == 32
    assert (np.diff(trace.times_s) >= 0).all() and (trace.output_tokens >= 1).all()
    assert (trace.blocks_of == -(-trace.input_tokens // 32)).all()
    assert trace.num_distinct_blocks < trace.num_accesses
    check_prefixes(trace)


def test_zipf_prefers_few():
    flat, steep = (generate(f"zipf:requests=2000,alpha={alpha},prefixes=500") for alpha in (0.0, 1.5))
    assert steep.num_distinct_blocks < 0.7 * flat.num_distinct_blocks


def test_arrivals_have_the_rate():
    trace = generate("zipf:requests=4000,rate=50")
    assert 4000 / trace.times_s[-1] == pytest.approx(50, rel=0.1)
    trace = generate("conversation:requests=4000,rate=50,turns=4,think_s=1")
    assert 4000 / trace.times_s[-1] == pytest.approx(50, rel=0.25)


def test_turns_grow():
    """One conversation without a system prompt and with very short waits: each prompt goes on from the one before it."""
    trace = generate("conversation:requests=30,rate=0.001,turns=1000000,systems=1,system=0,think_s=0.001,block_size=1")
    rows = [trace.keys[start:end].tolist() for start, end in zip(trace.offsets, trace.offsets[1:], strict=False)]
    for before, after, output in zip(rows, rows[1:], trace.output_tokens, strict=False):
        assert after[: len(before)] == before and len(after) > len(before) + output


def test_agents_branch():
    straight = generate("agentic:requests=300,branch=0,system=0,block_size=1,rate=0.01")
    split = generate("agentic:requests=300,branch=1,system=0,block_size=1,rate=0.01,steps=20")

    def most_continuations(trace):
        following = {}
        for start, end in zip(trace.offsets, trace.offsets[1:], strict=False):
            row = trace.keys[start:end].tolist()
            for above, key in pairwise(row):
                following.setdefault(above, set()).add(key)
        return max(map(len, following.values()))

    assert most_continuations(straight) == 1 and most_continuations(split) == 2


def test_scans_are_seen_once():
    trace = generate("scan:requests=60,hot=5,every=5,scans=1,hot_tokens=64,scan_tokens=640,block_size=64,suffix=1")
    scans = trace.blocks_of == 10
    assert scans.sum() == 10
    keys = np.concatenate([trace.keys[trace.offsets[row] : trace.offsets[row + 1]] for row in np.flatnonzero(scans)])
    assert len(np.unique(keys)) == 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "zipf:speed=3",
            "zipf has no parameter speed; known are alpha, block_size, output, prefix, prefixes, rate, requests",
        ),
        ("zipf:requests=0", "requests=0: Input should be greater"),
        ("zipf:requests=many", "requests=many: Input should be a valid integer"),
        ("zipf:requests", "'requests' is not parameter=value"),
        ("zipf:rate=nan", "rate=nan"),
        ("nothing:requests=3", "unknown generator 'nothing'; known are zipf, conversation, agentic, scan"),
    ],
)
def test_bad_parameters(text, words):
    with pytest.raises(TraceError, match=words):
        generate(text)


def test_what_is_a_generator():
    assert (
        is_generator("zipf")
        and is_generator("scan:hot=1")
        and not is_generator("./zipf")
        and not is_generator("zipf.csv")
    )


def test_text():
    counter = KeyCounter(4)
    text = Text(counter).grown(6)
    left, right = text.grown(3), text.grown(3)
    assert left.keys[:1] == right.keys[:1] == text.keys and left.keys[1] != right.keys[1]
    assert len(left.prompt_keys()) == 3 and left.prompt_keys(8) == list(left.keys)
    assert left.prompt_keys()[2] != left.prompt_keys()[2]
    assert text.cut(3).keys == () and text.cut(4).keys == text.keys


def test_too_many_blocks_are_refused(monkeypatch):
    monkeypatch.setattr("sagellm.replay.generate.base.MAX_TRACE_BLOCKS", 100)
    with pytest.raises(TraceError, match="by request 4 it has more than 100 blocks"):
        generate("scan:requests=20,hot=1,hot_tokens=64,suffix=1,every=3,scan_tokens=6144")


def test_a_parameter_is_given_once():
    with pytest.raises(TraceError, match="requests is there twice"):
        generate("zipf:requests=10,requests=20")
    with pytest.raises(TraceError, match="given apart as 8; give it once"):
        generate("zipf:block_size=4", block_size=8)
    assert generate("zipf:requests=3", block_size=8).block_size == 8
