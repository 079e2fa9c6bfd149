"""Answers of a prefill/decode group against those of one engine, and how long the way between the two engines takes."""

from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.pd.client import Reply, ask_all
from benchmarks.pd.group import pd_group, single_server
from benchmarks.pd.prompts import mixed_requests
from benchmarks.processes import metrics_of
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {"requests": 500, "places": 8, "channel": "shm", "alone": 20, "model": "demo"}
DEFINITIONS = {
    "pd_answers_equal": Definition(
        unit="1", better="higher",
        text="Share of `requests` greedy answers (float32, prompts of 8 to 1,500 tokens, of which 40% share a "
        "beginning, prefix caching on both sides, `places` at a time, every prompt split) that are those of one engine, text "
        "and reason of the end.",
    ),
    "pd_answers_split": Definition(
        unit="1", better=None, text="Share of them whose keys and values came from the other engine."
    ),
    "pd_answers_first_token_ms": Definition(
        unit="ms", better="lower",
        text="From the end of the prompt's step on one engine to the first token given out by the other, median of `alone` "
        "requests that come one after the other.",
    ),
    "pd_answers_joined_ms": Definition(
        unit="ms", better="lower",
        text="From the end of the prompt's step until the request stands in the other engine's queue with its keys and "
        "values, without the time of the transfer; median of the same.",
    ),
    "pd_answers_decoded_ms": Definition(
        unit="ms", better="lower",
        text="From the end of the prompt's step to the first token that the other engine computed itself, which is the second "
        "of the answer, without the time of the transfer; median of the same.",
    ),
    "pd_answers_decoded_p99_ms": Definition(unit="ms", better="lower", text="The longest but 1% of them."),
    "pd_answers_step_ms": Definition(unit="ms", better="lower", text="Time of the step that computed this token, median."),
    "pd_answers_waited_ms": Definition(
        unit="ms", better="lower", text="All but the transfer and the step: messages, a place in the pool, the queue; median."
    ),
    "pd_answers_waited_p99_ms": Definition(unit="ms", better="lower", text="The longest but 1% of them."),
    "pd_answers_transfer_ms": Definition(unit="ms", better="lower", text="Time of a transfer of these, on average."),
    "pd_answers_transfer_mib": Definition(unit="MiB", better=None, text="Bytes of it."),
}  # fmt: skip
POOL = ("--dtype", "float32", "--kv-blocks", "512")


def run(seed: int, requests: int, places: int, channel: str, alone: int, model: str) -> dict[str, float]:
    asked = mixed_requests(requests, seed, model=model)
    with single_server(POOL, model=model) as server:
        expected = ask_all(server.url, asked, places)
    _check(expected)
    with pd_group(["--policy", "always-split"], serve=(*POOL, "--kv-channel", channel), model=model) as group:
        decode = next(each["url"] for each in group.engines() if "-decode-" in each["name"])
        one_by_one = ask_all(group.url, mixed_requests(alone, seed + 1, lengths=(100, 1000), shared=0.0, model=model), 1)
        _check(one_by_one)
        first = metrics_of(decode)
        found = ask_all(group.url, asked, places)
        last = metrics_of(decode)
    _check(found)
    pairs = zip(found, expected, strict=True)
    done = 'sagellm_pd_requests_total{outcome="done",side="arrivals"}'
    return {
        "pd_answers_equal": sum((ours.text, ours.finish) == (theirs.text, theirs.finish) for ours, theirs in pairs) / requests,
        "pd_answers_split": (last[done] - first[done]) / requests,
        "pd_answers_first_token_ms": first['sagellm_pd_first_token_seconds{quantile="0.5"}'] * 1e3,
        "pd_answers_joined_ms": first['sagellm_pd_joined_seconds{quantile="0.5"}'] * 1e3,
        "pd_answers_decoded_ms": first['sagellm_pd_decoded_seconds{quantile="0.5"}'] * 1e3,
        "pd_answers_decoded_p99_ms": first['sagellm_pd_decoded_seconds{quantile="0.99"}'] * 1e3,
        "pd_answers_step_ms": first['sagellm_pd_decoded_step_seconds{quantile="0.5"}'] * 1e3,
        "pd_answers_waited_ms": first['sagellm_pd_decoded_wait_seconds{quantile="0.5"}'] * 1e3,
        "pd_answers_waited_p99_ms": first['sagellm_pd_decoded_wait_seconds{quantile="0.99"}'] * 1e3,
        "pd_answers_transfer_ms": first['sagellm_pd_seconds_total{part="transfer"}'] / first[done] * 1e3,
        "pd_answers_transfer_mib": first["sagellm_pd_transfer_bytes_total"] / first[done] / 2**20,
    }


def _check(replies: list[Reply]) -> None:
    if wrong := [each for each in replies if each.error]:
        raise BenchmarkError(f"{len(wrong)} of {len(replies)} requests failed; the first: {wrong[0].status} {wrong[0].error}")
