"""Counters of an engine of a prefill/decode group, as Prometheus metrics."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["pd_families"]

TIMES = {
    "first_token_s": (
        "sagellm_pd_first_token_seconds", "Time from the end of a prompt's step until its first token leaves this engine.",
    ),
    "joined_s": (
        "sagellm_pd_joined_seconds",
        "Time from the end of a prompt's step until the request is in the queue here, without the transfer.",
    ),
    "decoded_s": (
        "sagellm_pd_decoded_seconds",
        "Time from the end of a prompt's step until this engine has computed a token, without the transfer.",
    ),
    "step_s": ("sagellm_pd_decoded_step_seconds", "Time of the step that computed a request's first token on this engine."),
    "waited_s": ("sagellm_pd_decoded_wait_seconds", "The time of sagellm_pd_decoded_seconds without the step."),
}  # fmt: skip


def pd_families(report: dict[str, Any]) -> Iterator[Metric]:
    """Families of the report of `PrefillDecode`. Quantiles are those of the latest 1,024 requests."""
    transfers = CounterMetricFamily(
        "sagellm_pd_requests", "Prompts kept for other engines, and fetched from them, by outcome.",
        labels=["side", "outcome"],
    )  # fmt: skip
    for side in ("offers", "arrivals"):
        for outcome, number in report[side].items():
            transfers.add_metric([side, outcome], number)
    yield transfers
    running = GaugeMetricFamily(
        "sagellm_pd_running", "Prompts held for other engines now, and prompts that this engine waits for.", labels=["side"]
    )
    running.add_metric(["offers"], report["held"])
    running.add_metric(["arrivals"], report["arriving"])
    yield running
    yield GaugeMetricFamily("sagellm_pd_peers", "Prefill engines that this engine is connected to.", value=len(report["peers"]))
    yield CounterMetricFamily("sagellm_pd_transfer_bytes", "Bytes of keys and values that were fetched.", value=report["bytes"])
    seconds = CounterMetricFamily("sagellm_pd_seconds", "Seconds of requests whose prompt was fetched.", labels=["part"])
    for part, spent in report["seconds"].items():
        seconds.add_metric([part], spent)
    yield seconds
    for key, (name, text) in TIMES.items():
        family = GaugeMetricFamily(name, text, labels=["quantile"])
        for quantile, value in report[key].items():
            family.add_metric([quantile], value)
        yield family
