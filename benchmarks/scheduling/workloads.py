"""Requests with arrival times and service levels: what strategies are told apart by."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.models.real_text import RealText

VOCABULARY = 30_000
# Makes a prompt of so many tokens.
Source = Callable[[np.random.Generator, int], list[int]]


class Job(NamedTuple):
    """One request. `group`: whose figures it counts among; `service`: fields of a `ServiceRequest`; `adapter`: its model."""

    arrival_s: float
    prompt: list[int]
    new_tokens: int
    group: str
    service: dict[str, Any]
    adapter: str | None = None


def random_tokens(random: np.random.Generator, num_tokens: int) -> list[int]:
    return random.integers(10, VOCABULARY, num_tokens).tolist()


def english(text: RealText) -> Source:
    return lambda random, num_tokens: text.prose(num_tokens, int(random.integers(2**31)))


def mixed(
    seed: int, seconds: float, chats_per_s: float, documents_per_s: float, *, chat_tokens: int = 64, chat_new: int = 24,
    document_tokens: int = 2048, document_new: int = 24, ttft_slo_ms: float = 1000.0, tpot_slo_ms: float = 400.0,
    source: Source = random_tokens,
) -> list[Job]:  # fmt: skip
    """Short chats, urgent and with targets, among long documents, with a loose target and no hurry. Poisson arrivals."""
    random = np.random.default_rng(seed)
    chat = {"priority": -10, "ttft_slo_ms": ttft_slo_ms, "tpot_slo_ms": tpot_slo_ms}
    document = {"priority": 10, "ttft_slo_ms": 30 * ttft_slo_ms, "tpot_slo_ms": 10 * tpot_slo_ms}
    jobs = [
        Job(at, source(random, chat_tokens), chat_new, "chat", chat)
        for at in _arrivals(random, seconds, chats_per_s)
    ] + [
        Job(at, source(random, document_tokens), document_new, "document", document)
        for at in _arrivals(random, seconds, documents_per_s)
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: job.arrival_s)


def long_prompt(
    seed: int, streams: int, stream_new: int, prompt_tokens: int, arrival_s: float, source: Source = random_tokens
) -> list[Job]:
    """Streams that decode, and one prompt that arrives in their midst."""
    random = np.random.default_rng(seed)
    jobs = [Job(0.0, source(random, 32), stream_new, "stream", {}) for _ in range(streams)]
    return [*jobs, Job(arrival_s, source(random, prompt_tokens), 4, "prompt", {})]


def two_tenants(
    seed: int, jobs: int, ratio: int = 10, tokens: int = 64, new_tokens: int = 16, source: Source = random_tokens
) -> list[Job]:
    """All at once: tenant `heavy` sends `ratio` times as many requests as `light`, the heavy ones first."""
    random = np.random.default_rng(seed)
    heavy = [Job(0.0, source(random, tokens), new_tokens, "heavy", {"tenant": "heavy"}) for _ in range(jobs * ratio)]
    light = [Job(0.001, source(random, tokens), new_tokens, "light", {"tenant": "light"}) for _ in range(jobs)]
    return heavy + light


def models(
    seed: int, seconds: float, chats_per_s: float, num_models: int = 2, tokens: int = 64, new_tokens: int = 48,
    ttft_slo_ms: float = 6000.0, tpot_slo_ms: float = 250.0, source: Source = random_tokens,
) -> list[Job]:  # fmt: skip
    """Chats of several models that share an engine, so many a second of each, with targets. Poisson arrivals."""
    random = np.random.default_rng(seed)
    slo = {"ttft_slo_ms": ttft_slo_ms, "tpot_slo_ms": tpot_slo_ms}
    jobs = [
        Job(at, source(random, tokens), new_tokens, "chat", slo, f"model{number}")
        for number in range(num_models)
        for at in _arrivals(random, seconds, chats_per_s)
    ]
    return sorted(jobs, key=lambda job: job.arrival_s)


def burst(seed: int, count: int, source: Source = random_tokens) -> list[Job]:
    """All at once, of many lengths: what an engine does with them depends on nothing but its scheduler."""
    random = np.random.default_rng(seed)
    return [
        Job(0.0, source(random, int(random.integers(8, 300))), int(random.integers(4, 40)), "burst", {})
        for _ in range(count)
    ]


def crowd(seed: int, count: int, tokens: int, new_tokens: int, late: int = 0, late_s: float = 0.0) -> list[Job]:
    """All alike, and at once, but for the last `late` of them, which come one by one over `late_s` seconds."""
    random = np.random.default_rng(seed)
    arrivals = [0.0] * (count - late) + [late_s * (number + 1) / late for number in range(late)]
    return [Job(at, random_tokens(random, tokens), new_tokens, "crowd", {}) for at in arrivals]


def _arrivals(random: np.random.Generator, seconds: float, per_s: float) -> list[float]:
    gaps = random.exponential(1 / per_s, int(3 * seconds * per_s) + 20)
    times = np.cumsum(gaps)
    return times[times < seconds].tolist()
