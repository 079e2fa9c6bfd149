"""Definitions of the metrics, exact enough to compute them again from the samples and counters.

    python -m benchmarks.metrics.definitions > benchmarks/docs/metrics.md

prints the page that users read.
"""

from collections.abc import Mapping

from benchmarks.result import Definition

PERCENTILES = (50, 95, 99)

_LATENCIES = {
    "ttft": (
        "Time to first token: arrival of the first chunk that carried a token minus the moment the request was sent "
        "(`first_s - sent_s`). It counts from the real send, also in an open loop; how much later than scheduled that "
        "was is the client's lag, reported apart. Needs streaming: samples in which every answer of several tokens "
        "came in one chunk are refused, since theirs would be the total latency. One value a request."
    ),
    "tpot": (
        "Time per output token after the first: `(last_s - first_s) / (output_tokens - 1)`, output tokens as the "
        "server counted them. Requests with fewer than two output tokens are left out. One value a request."
    ),
    "itl": (
        "Inter-token latency: the gap between the arrivals of two successive chunks of one request. A chunk of k tokens "
        "that comes g seconds after the one before counts as k gaps of g / k; the tokens of a request's first chunk have "
        "no gap. Percentiles are over the gaps of all requests together, so long answers weigh more."
    ),
    "e2e": (
        "End-to-end latency: arrival of the last chunk that carried a token minus the moment the request was sent "
        "(`last_s - sent_s`). One value a request."
    ),
}

_WALL = (
    "The wall time of a round runs from its first send to the arrival of its last token, whichever requests, answered "
    "whole or not, these belong to."
)


_PERCENTILE = (
    "Only requests that were answered whole and got a token. pN is percentile N, with linear interpolation between the "
    "two nearest values."
)
_COUNTERS = ", as differences of the server's counters after and before the round"
_PREFIX = (
    "Only the contiguous prefix counts: the match ends with the first block that is missing, whatever else of the prompt "
    "is cached behind it."
)


def _latency(name: str) -> Definition:
    return Definition(unit="s", better="lower", text=f"{_LATENCIES[name]} {_PERCENTILE}")


def _hit_rate(counted: str, share: str, admissions: str) -> Definition:
    text = f"{share}{_COUNTERS}, over {admissions}. {_PREFIX} {counted}"
    return Definition(unit="ratio", better="higher", text=text)


_FIRST = "the first admission of each request; re-admissions after a preemption are counted apart"
_TOKENS = "Tokens found in the cache / tokens looked up"

DEFINITIONS: dict[str, Definition] = {
    **{f"{name}_p{number}_s": _latency(name) for name in _LATENCIES for number in PERCENTILES},
    "output_tokens_per_s": Definition(
        unit="tokens/s",
        better="higher",
        text=f"Output tokens of the requests that were answered whole / wall time. {_WALL}",
    ),
    "requests_per_s": Definition(
        unit="requests/s", better="higher", text=f"Requests that were answered whole / wall time. {_WALL}"
    ),
    "goodput_rps": Definition(
        unit="requests/s",
        better="higher",
        text=(
            "Requests that were answered whole and met every SLO of the config (TTFT <= `slo.ttft_s` and, with two or "
            "more output tokens, TPOT <= `slo.tpot_s`) / wall time. In a mixed load the targets that a request's class asks "
            f"for take the place of the config's. A request without a token is not good. {_WALL}"
        ),
    ),
    "failed_requests": Definition(
        unit="requests",
        better="lower",
        text="Requests of the round that were not answered whole, those that were never sent among them.",
    ),
    "mfu": Definition(
        unit="ratio",
        better="higher",
        text=(
            "Model FLOPs utilisation: analytic FLOPs / (wall time x peak FLOP/s of all devices). FLOPs are those of the "
            "tokens that were computed for requests answered whole. These are the prompt tokens minus the cached ones of first "
            "admissions, plus the output tokens but the last, which is never fed back. Linear layers 2 x weights a token, "
            "the output layer only for sampled tokens, attention 4 x heads x head_dim x context a token and layer, with "
            "the causal context. Cached tokens are counted by the server in total and spread over the requests in "
            "proportion to their prompts. Computation repeated after a preemption does not count. The peak is dense "
            "(never 2:4 sparse), of the model's dtype, and named in the result. On a CPU it is the measured GEMM peak of the "
            f"threads of all ranks together. {_WALL}"
        ),
    ),
    "kv_hit_rate_tokens": _hit_rate(
        "Per token, so long prompts weigh more.", _TOKENS, _FIRST
    ),
    "kv_hit_rate_blocks": _hit_rate(
        "Per block: only whole blocks are looked up, so a prompt's tail shorter than a block is not counted.",
        "Blocks found in the cache / blocks looked up",
        _FIRST,
    ),
    "kv_hit_rate_retries": _hit_rate(
        "Per token. A request sent back more than once counts each time it comes in again.",
        _TOKENS,
        "re-admissions after a preemption",
    ),
    "preemptions": Definition(
        unit="preemptions",
        better="lower",
        text=(
            "Times a running request lost its place and had to be admitted again, difference of the server's counter "
            "after and before the round."
        ),
    ),
    "comm_share": Definition(
        unit="ratio",
        better="lower",
        text=(
            "Exposed communication / wall-clock seconds of engine steps, both as differences of the server's counters. This is "
            "the wall-clock time in which a rank waited for a collective and computed nothing: the sum over the kinds of "
            "collective, the largest of the ranks. Communication hidden behind computation does not count. Exactly 0 "
            "with tensor parallelism 1, where there is no collective. `comm.OPERATION.KIND` say of each kind of collective "
            "its part of the share, how many there were, their latency, and algorithm and bus bandwidth."
        ),
    ),
    "spec_acceptance": Definition(
        unit="ratio",
        better=None,
        text=(
            "Guesses of the speculative strategy that were right / guesses that the model computed, as differences of the "
            "server's counters after and before the round. A guess counts as right only together with all guesses before it "
            "in its sequence and step. A strategy with fewer, surer guesses has the higher rate, but not always the higher "
            "speed. "
            "`spec_acceptance_at.PLACE` say it of each place in a step. "
            "Absent where the server does not guess, and for LMDeploy's own methods, which count nothing here."
        ),
    ),
    "spec_mean_accepted": Definition(
        unit="tokens",
        better=None,
        text=(
            "Mean accepted length: right guesses / decode steps in which a sequence had guesses, summed over the sequences, as "
            "differences of the server's counters after and before the round. The token that the model adds does not count. "
            "Absent as `spec_acceptance` is."
        ),
    ),
    "spec_tokens_per_step": Definition(
        unit="tokens",
        better="higher",
        text=(
            "Tokens that a sequence gets in a decode step: 1 + right guesses / decode steps summed over their sequences, those "
            "without guesses among them, as differences of the server's counters after and before the round. 1 when no guess "
            "is right. An answer's end in the middle of a step cuts off what it would have got. Absent as `spec_acceptance` is."
        ),
    ),
    "device_s_per_mtok": Definition(
        unit="device-s/Mtok",
        better="lower",
        text=(
            "Devices held x wall time / output tokens of the requests that were answered whole x 10^6. A CPU machine is "
            f"one device, whatever its cores. {_WALL}"
        ),
    ),
    "cost_per_mtok": Definition(
        unit="money/Mtok",
        better="lower",
        text=(
            "`device_s_per_mtok` / 3600 x `price.per_device_hour` of the config, in `price.currency`: the price of 10^6 "
            "output tokens, their prompts included. Absent when the config gives no price."
        ),
    ),
    "peak_memory_bytes": Definition(
        unit="bytes",
        better="lower",
        text=(
            "Host memory of the server: the sum of the largest resident sets of its process and of each process below it. "
            "They are the kernel's high-water marks, reset at the start of the round. A shared page counts in each process. "
            "Memory of an accelerator is not in it."
        ),
    ),
}  # fmt: skip


def grouped(definitions: Mapping[str, Definition]) -> list[tuple[list[str], Definition]]:
    """Names that share one definition, such as the percentiles of a latency, together; in order of first mention."""
    groups: list[tuple[list[str], Definition]] = []
    for name, definition in definitions.items():
        names = next((names for names, known in groups if known == definition), None)
        if names is None:
            groups.append(([name], definition))
        else:
            names.append(name)
    return groups


def document() -> str:
    """Return the text of `benchmarks/docs/metrics.md`. Its top has the rules that several definitions share."""
    lines = [
        "# Metrics",
        "",
        "`python -m benchmarks.metrics.definitions > benchmarks/docs/metrics.md` writes this page. Every result carries the "
        "definitions of its metrics. Names such as `first_s` are arrays of the samples file (`benchmarks/load/samples.py`).",
        "",
        f"- Latencies. {_PERCENTILE}",
        f"- Wall time. {_WALL}",
        "- Counters of the server are taken as differences, after and before the round.",
        f"- Hit rates. {_PREFIX}",
    ]
    for names, definition in grouped(DEFINITIONS):
        better = f"{definition.better} is better" if definition.better else "neither way is better"
        text = definition.text
        for common in (f" {_PERCENTILE}", f" {_WALL}", _COUNTERS, f" {_PREFIX}"):
            text = text.replace(common, "")
        lines += ["", f"## {', '.join(names)}", "", f"In {definition.unit}; {better}. {text}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
