"""Samples of a few requests, as Hypothesis draws them and as a plain list writes them down."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from benchmarks.load.samples import Samples


class Request(NamedTuple):
    """`chunks`: (arrival in seconds, tokens); a request that was never sent has `sent_s` NaN."""

    sent_s: float
    ok: bool
    chunks: Sequence[tuple[float, int]]
    prompt_tokens: int = 10

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)


def make_samples(requests: Sequence[Request]) -> Samples:
    chunks = [chunk for request in requests for chunk in request.chunks]
    counts = [len(request.chunks) for request in requests]
    nan = float("nan")
    return Samples(
        scheduled_s=np.zeros(len(requests)),
        sent_s=np.array([request.sent_s for request in requests], dtype=np.float64),
        first_s=np.array([request.chunks[0][0] if request.chunks else nan for request in requests]),
        last_s=np.array([request.chunks[-1][0] if request.chunks else nan for request in requests]),
        prompt_tokens=np.array([request.prompt_tokens for request in requests], dtype=np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], dtype=np.int64),
        ok=np.array([request.ok for request in requests], dtype=bool),
        chunk_offsets=np.cumsum([0, *counts]),
        chunk_s=np.array([arrival for arrival, _ in chunks], dtype=np.float64),
        chunk_tokens=np.array([tokens for _, tokens in chunks], dtype=np.int64),
        errors=np.array(["" if request.ok else "broken" for request in requests]),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    if draw(st.integers(0, 9)) == 0:
        return Request(float("nan"), False, ())
    sent = clock = draw(st.floats(0, 100))
    chunks = []
    for gap, tokens in draw(st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), max_size=6)):
        clock += gap
        chunks.append((clock, tokens))
    return Request(sent, draw(st.integers(0, 4)) > 0, tuple(chunks))
