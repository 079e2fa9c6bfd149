"""Samples of one round of load, request by request, in a compact file."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Samples:
    """Raw samples of one round; n requests, m chunks. Times are seconds since the start of the round.

    Attributes:
        scheduled_s: float64 [n], when the request should have been sent.
        sent_s: float64 [n], when it was; NaN if it never was.
        first_s: float64 [n], arrival of the first chunk that carried a token; NaN without one.
        last_s: float64 [n], arrival of the last chunk that carried a token; NaN without one.

        prompt_tokens: int64 [n], as the server counted them.
        output_tokens: int64 [n], as the server counted them.
        ok: bool [n], answered whole.

        chunk_offsets: int64 [n + 1], rows of the two arrays below that belong to each request.
        chunk_s: float64 [m], arrival of each chunk that carried a token.
        chunk_tokens: int64 [m], tokens in it.

        errors: [n] str, empty for a request that is ok.
    """

    scheduled_s: np.ndarray
    sent_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    ok: np.ndarray
    chunk_offsets: np.ndarray
    chunk_s: np.ndarray
    chunk_tokens: np.ndarray
    errors: np.ndarray

    def only(self, wanted: np.ndarray) -> "Samples":
        """Those of some requests, in their order; `wanted`: bool [n]."""
        counts = np.diff(self.chunk_offsets)
        chunks = np.repeat(wanted, counts)
        alone = {field.name: getattr(self, field.name)[wanted] for field in fields(self) if not field.name.startswith("chunk_")}
        return Samples(
            **alone,
            chunk_offsets=np.concatenate([[0], np.cumsum(counts[wanted])]).astype(np.int64),
            chunk_s=self.chunk_s[chunks],
            chunk_tokens=self.chunk_tokens[chunks],
        )

    def write(self, file: Path) -> None:
        np.savez_compressed(file, **{field.name: getattr(self, field.name) for field in fields(self)})


def read_samples(file: Path) -> Samples:
    with np.load(file, allow_pickle=False) as arrays:
        return Samples(**{field.name: arrays[field.name] for field in fields(Samples)})
