"""From samples and counters to metrics: pure functions, vectorised. `definitions.py` says what each metric means."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.config import Price, Slo
from benchmarks.errors import BenchmarkError
from benchmarks.load.samples import Samples
from benchmarks.metrics import comm
from benchmarks.metrics.definitions import PERCENTILES
from benchmarks.metrics.guesses import guess_metrics

Counters = Mapping[str, float]

NO_ANSWER = "no request was answered whole"


class Measured(NamedTuple):
    """Metrics that could be computed, and why each of the others could not."""

    metrics: dict[str, float]
    absent: dict[str, str]


class Ratio(NamedTuple):
    """Ours / theirs over pairs: the median and the 95% bootstrap interval of the median, NaN with fewer than `MIN_PAIRS`."""

    median: float
    low: float
    high: float
    num_pairs: int


def latencies(samples: Samples) -> dict[str, np.ndarray]:
    """Seconds: `ttft`, `e2e` [requests with a token], `tpot` [with two or more], `itl` [gaps]; of whole answers only."""
    some = samples.ok & np.isfinite(samples.first_s)
    many = some & (samples.output_tokens >= 2)
    return {
        "ttft": (samples.first_s - samples.sent_s)[some],
        "tpot": (samples.last_s - samples.first_s)[many] / (samples.output_tokens[many] - 1),
        "itl": _gaps(samples),
        "e2e": (samples.last_s - samples.sent_s)[some],
    }


def request_metrics(samples: Samples, slo: Slo, round_s: float | None = None) -> Measured:
    """Latency percentiles, rates, goodput and failures of one round. O(n log n) in requests and tokens.

    `round_s`: the wall time of the whole round, where the samples are a part of it: then no answer is a rate of 0.

    Raises:
        BenchmarkError: no answer of several tokens was streamed, so that TTFT would be the total latency.
    """
    _refuse_unstreamed(samples)
    metrics = {"failed_requests": float(np.count_nonzero(~samples.ok))}
    absent: dict[str, str] = {}
    for name, values in latencies(samples).items():
        names = [f"{name}_p{percentile}_s" for percentile in PERCENTILES]
        if len(values):
            metrics.update(zip(names, np.percentile(values, PERCENTILES).tolist(), strict=True))
        else:
            absent.update(dict.fromkeys(names, _why_none(name, samples)))
    wall = wall_s(samples) if round_s is None else round_s
    rates = {
        "output_tokens_per_s": output_tokens(samples),
        "requests_per_s": np.count_nonzero(samples.ok),
        "goodput_rps": np.count_nonzero(good(samples, slo)),
    }
    if wall > 0 and (samples.ok.any() or round_s is not None):
        metrics.update({name: float(count / wall) for name, count in rates.items()})
    else:
        absent.update(dict.fromkeys(rates, NO_ANSWER if not samples.ok.any() else "no token arrived"))
    return Measured(metrics, absent)


def good(samples: Samples, slo: Slo) -> np.ndarray:
    """bool [n]: answered whole, with a token, and within every SLO."""
    met = samples.ok & (samples.first_s - samples.sent_s <= slo.ttft_s)  # False where first_s is NaN
    tpot = (samples.last_s - samples.first_s) / np.maximum(samples.output_tokens - 1, 1)
    return met & ((samples.output_tokens < 2) | (tpot <= slo.tpot_s))


def wall_s(samples: Samples) -> float:
    """Seconds from the first send to the arrival of the last token; 0 when nothing was sent or nothing arrived."""
    sent, last = samples.sent_s[np.isfinite(samples.sent_s)], samples.last_s[np.isfinite(samples.last_s)]
    return float(last.max() - sent.min()) if len(sent) and len(last) else 0.0


def output_tokens(samples: Samples) -> int:
    """Return the latencies of requests that were answered whole."""
    return int(samples.output_tokens[samples.ok].sum())


def counter_metrics(before: Counters, after: Counters, tensor_parallel: int = 1) -> Measured:
    """Hit rates, preemptions, communication share and guesses from the server's counters around a round.

    `before` and `after` as `parse_prometheus` gives them. A series that appears during the round began at 0.

    Raises:
        BenchmarkError: a counter fell, so the server was restarted in between.
    """
    deltas = _deltas(before, after)
    metrics: dict[str, float] = {}
    absent: dict[str, str] = {}
    for metric, unit, admission in (
        ("kv_hit_rate_tokens", "tokens", "first"),
        ("kv_hit_rate_blocks", "blocks", "first"),
        ("kv_hit_rate_retries", "tokens", "retry"),
    ):
        name = f"sagellm_prefix_{unit}_total"
        asked, found = (deltas.get(series(name, kind=kind, admission=admission)) for kind in ("query", "hit"))
        if asked is None or found is None:
            absent[metric] = f"the server does not count {name} with admission={admission}"
        elif asked == 0:
            absent[metric] = "no request was admitted again" if admission == "retry" else f"no {unit} were looked up"
        else:
            metrics[metric] = found / asked
    if (preemptions := deltas.get("sagellm_preemptions_total")) is None:
        absent["preemptions"] = "the server does not count sagellm_preemptions_total"
    else:
        metrics["preemptions"] = preemptions
    _comm_share(deltas, tensor_parallel, metrics, absent)
    of_guesses, no_guesses = guess_metrics(deltas)
    return Measured(metrics | of_guesses, absent | no_guesses)


def cost_metrics(devices: int, wall: float, num_output_tokens: int, price: Price) -> Measured:
    """Device-seconds and money for 10^6 output tokens; `wall` in seconds."""
    names = ("device_s_per_mtok", "cost_per_mtok")
    if num_output_tokens == 0:
        return Measured({}, dict.fromkeys(names, "no output token to pay for"))
    device_s = devices * wall / num_output_tokens * 1e6
    if price.per_device_hour == 0:
        return Measured({names[0]: device_s}, {names[1]: "the config gives no price.per_device_hour"})
    return Measured({names[0]: device_s, names[1]: device_s / 3600 * price.per_device_hour}, {})


def mfu(flops: float, wall: float, peak_flops: float, devices: int = 1) -> float:
    """Share of the dense peak (FLOP/s of one device) that `flops` in `wall` seconds took."""
    return flops / (wall * peak_flops * devices)


LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*"'
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|Inf|NaN)"
SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:{{((?:{LABEL},?)*)}})?[ \t]+({NUMBER})(?:[ \t]+-?\d+)?")
ESCAPED = re.compile(r"\\(.)")


def parse_prometheus(text: str) -> dict[str, float]:
    """Series name as `series` writes it -> value. Raises BenchmarkError when the text is no Prometheus exposition.

    Not by `prometheus_client`: it tries `int` on every value, which fails on most, and where Python (seen on 3.11) writes the
    message of that error it loses a Ctrl-C that has just come.
    """
    found = {}
    for line in map(str.strip, text.split("\n")):
        if not line or line.startswith("#"):
            continue
        if (sample := SAMPLE.fullmatch(line)) is None:
            raise BenchmarkError(f"the server's metrics cannot be read: {line[:80]!r} is no sample")
        name, labels, value = sample.groups()
        found[series(name, **_labels(labels or ""))] = float(value)
    return found


def _labels(text: str) -> dict[str, str]:
    pairs = (label.split("=", 1) for label in re.findall(LABEL, text))
    return {name: ESCAPED.sub(lambda found: {"n": "\n"}.get(found[1], found[1]), value[1:-1]) for name, value in pairs}


def series(metric: str, /, **labels: str) -> str:
    """`metric{a="1",b="2"}`, labels in alphabetical order; the bare metric without labels."""
    escaped = {key: value.replace("\\", r"\\").replace('"', r"\"") for key, value in sorted(labels.items())}
    inside = ",".join(f'{key}="{value}"' for key, value in escaped.items())
    return f"{metric}{{{inside}}}" if inside else metric


MIN_PAIRS = 5  # the median of fewer pairs lies outside even their whole range more than 1 time in 10


def paired_ratio(pairs: np.ndarray, seed: int = 0, resamples: int = 4000) -> Ratio | None:
    """Ratio of ours to theirs, float[num_pairs, 2]; None without a pair in which theirs is above 0."""
    ours, theirs = pairs[pairs[:, 1] > 0].T
    if not len(ours):
        return None
    ratios = ours / theirs
    low = high = float("nan")
    if len(ratios) >= MIN_PAIRS:
        picks = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
        low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5)).tolist()
    return Ratio(float(np.median(ratios)), low, high, len(ratios))


def _gaps(samples: Samples) -> np.ndarray:
    counts = np.diff(samples.chunk_offsets)
    request = np.repeat(np.arange(len(counts)), counts)
    # Pairs of rows that belong to one request, and that request was answered whole.
    inner = (request[1:] == request[:-1]) & samples.ok[request[1:]]
    tokens = samples.chunk_tokens[1:][inner]
    return np.repeat(np.diff(samples.chunk_s)[inner] / tokens, tokens)


def _refuse_unstreamed(samples: Samples) -> None:
    many = samples.ok & np.isfinite(samples.first_s) & (samples.output_tokens >= 2)
    if many.any() and np.array_equal(samples.first_s[many], samples.last_s[many]):
        raise BenchmarkError(
            f"all {np.count_nonzero(many)} answers of several tokens came in one chunk: without streaming TTFT would be "
            "the total latency, so it is refused; ask for a stream, and for answers longer than one chunk"
        )


def _why_none(name: str, samples: Samples) -> str:
    if not samples.ok.any():
        return NO_ANSWER
    return {
        "tpot": "no answer has two or more output tokens",
        "itl": "no answer has two or more chunks",
    }.get(name, "no answer has an output token")


def _deltas(before: Counters, after: Counters) -> dict[str, float]:
    deltas = {name: value - before.get(name, 0.0) for name, value in after.items() if _ours(name)}
    for name, delta in deltas.items():
        if delta < 0:
            raise BenchmarkError(
                f"{name} fell from {before[name]:g} to {after[name]:g}: the server was restarted during the round"
            )
    return deltas


def _ours(name: str) -> bool:
    """Gauges and other programs' series may fall as they like."""
    return name.startswith("sagellm_") and name.split("{")[0].endswith(("_total", "_sum", "_count"))


def _comm_share(deltas: Counters, tensor_parallel: int, metrics: dict[str, float], absent: dict[str, str]) -> None:
    if tensor_parallel == 1:
        metrics["comm_share"] = 0.0
        return
    ranks, steps = comm.by_rank(deltas), deltas.get(comm.STEPS)
    if not ranks or steps is None:
        absent["comm_share"] = f"the server does not count {comm.SECONDS} and {comm.STEPS}"
    elif steps == 0:
        absent["comm_share"] = "no engine step was made"
    else:
        rank, exposed_s = comm.longest(ranks)
        metrics["comm_share"] = exposed_s / steps
        metrics |= comm.operation_metrics(ranks[rank], steps)
