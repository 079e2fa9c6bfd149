"""Counters and rates of an index, as JSON and for Prometheus."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from sagellm.core.errors import PrefixIndexError

COUNTERS = {
    "lookups": "Lookups.",
    "hits": "Lookups that found at least one block.",
    "query_tokens": "Tokens that lookups were given.",
    "matched_tokens": "Tokens that lookups found cached.",
    "inserts": "Insertions, extensions among them.",
    "inserted_tokens": "Tokens of the full blocks that insertions were given.",
    "new_blocks": "Blocks that insertions added.",
    "collisions": "Equal hashes of different tokens, told apart by comparing the tokens.",
}
GAUGES = {
    "nodes": "Nodes of the tree.",
    "locks": "Locks that are held.",
    "memory_bytes": "Memory of the index itself, without the KV blocks and without kept events.",
}
RATES = {
    "token_hit_rate": "Share of looked-up tokens that were cached, since the start.",
    "lookup_hit_rate": "Share of lookups that found at least one block, since the start.",
    "mean_matched_length": "Mean tokens of a match, over lookups that found any.",
    "collision_rate": "Hash collisions a lookup, since the start.",
}


class PrefixReuseMetrics(BaseModel):
    """Counters since the index was made, and its state now. None: nothing has been measured yet.

    Attributes:
        removed_blocks: by reason (`RemovalReason`); a block whose copy moved up a tier counts as replaced.
        cached_blocks: by tier.
        lookup_p50_ns, lookup_p99_ns: upper bounds of the percentile's bucket, over the lookups that were sampled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lookups: int = Field(0, ge=0)
    hits: int = Field(0, ge=0)
    query_tokens: int = Field(0, ge=0)
    matched_tokens: int = Field(0, ge=0)
    inserts: int = Field(0, ge=0)
    inserted_tokens: int = Field(0, ge=0)
    new_blocks: int = Field(0, ge=0)
    removed_blocks: dict[str, int] = {}
    collisions: int = Field(0, ge=0)
    cached_blocks: dict[str, int] = {}
    nodes: int = Field(0, ge=0)
    locks: int = Field(0, ge=0)
    memory_bytes: int = Field(0, ge=0)
    lookup_p50_ns: float | None = None
    lookup_p99_ns: float | None = None

    @model_validator(mode="after")
    def _possible(self) -> "PrefixReuseMetrics":
        if self.hits > self.lookups or self.matched_tokens > self.query_tokens:
            raise ValueError("more was found than was looked up")
        return self

    @classmethod
    def from_counters(cls, counters: Mapping[str, Any]) -> "PrefixReuseMetrics":
        """From what `PrefixIndex.metrics()` returns.

        `counters["latency_ns"]`: [upper bound in ns, samples] of each bucket, in rising order; may be empty.

        Raises:
            PrefixIndexError: a counter is missing, unknown or impossible.
        """
        values = dict(counters)
        try:
            histogram, values["cached_blocks"] = values.pop("latency_ns"), values.pop("blocks")
            missing = sorted({*COUNTERS, *GAUGES, "removed_blocks"} - values.keys())
            if missing:
                raise KeyError(missing[0])
            return cls(**values, lookup_p50_ns=quantile(histogram, 0.5), lookup_p99_ns=quantile(histogram, 0.99))
        except KeyError as error:
            raise PrefixIndexError(f"the counters lack {error}; pass what metrics() of an index returned.") from None
        except (ValidationError, TypeError) as error:
            raise PrefixIndexError(f"these are no counters of a prefix index: {error}") from None

    @computed_field
    @property
    def token_hit_rate(self) -> float | None:
        """Matched tokens, of those asked for; 0 to 1."""
        return _ratio(self.matched_tokens, self.query_tokens)

    @computed_field
    @property
    def lookup_hit_rate(self) -> float | None:
        """Lookups that found something; 0 to 1."""
        return _ratio(self.hits, self.lookups)

    @computed_field
    @property
    def mean_matched_length(self) -> float | None:
        """Tokens, over the lookups that found something."""
        return _ratio(self.matched_tokens, self.hits)

    @computed_field
    @property
    def collision_rate(self) -> float | None:
        """Hash collisions a lookup."""
        return _ratio(self.collisions, self.lookups)

    @property
    def evicted_blocks(self) -> int:
        return self.removed_blocks.get("evicted", 0)

    def to_json(self) -> str:
        """One object: the fields and the rates."""
        return self.model_dump_json()

    def to_prometheus(self) -> str:
        """Return the Prometheus text format; names are `sagellm_prefix_*`."""
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        return generate_latest(registry).decode()

    def families(self) -> Iterator[Metric]:
        """Yield the metrics that `to_prometheus` writes."""
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"sagellm_prefix_{name}", text, value=getattr(self, name))
        for name, text in RATES.items():
            if (value := getattr(self, name)) is not None:
                yield GaugeMetricFamily(f"sagellm_prefix_{name}", text, value=value)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"sagellm_prefix_{name}", text, value=getattr(self, name))
        removed = CounterMetricFamily("sagellm_prefix_removed_blocks", "Blocks removed, by reason.", labels=["reason"])
        for reason, number in self.removed_blocks.items():
            removed.add_metric([reason], number)
        yield removed
        cached = GaugeMetricFamily("sagellm_prefix_cached_blocks", "Blocks cached, by tier.", labels=["tier"])
        for tier, number in self.cached_blocks.items():
            cached.add_metric([tier], number)
        yield cached
        text = "Time of a lookup, over those sampled: upper bound of the quantile's bucket."
        latency = GaugeMetricFamily("sagellm_prefix_lookup_seconds", text, labels=["quantile"])
        for label, value_ns in (("0.5", self.lookup_p50_ns), ("0.99", self.lookup_p99_ns)):
            if value_ns is not None:
                latency.add_metric([label], value_ns / 1e9)
        yield latency


class _Collector:
    """Metrics of one moment."""

    def __init__(self, metrics: PrefixReuseMetrics) -> None:
        self.collect = metrics.families


def quantile(histogram: Sequence[Sequence[float]], share: float) -> float | None:
    """Upper bound of the bucket that holds the quantile; None if it is not known. Buckets: [upper bound, samples]."""
    wanted = share * sum(samples for _, samples in histogram)
    seen = 0
    for bound, samples in histogram:
        seen += samples
        if samples and seen >= wanted:
            return float(bound) if math.isfinite(bound) else None
    return None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
