"""Numbers of an index: counted right, None where nothing was measured, readable by Prometheus."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import PrefixReuseMetrics
from sagellm.prefix_reuse.metrics import quantile
from sagellm.serve.metrics import families

COUNTERS = dict(
    lookups=10, hits=4, query_tokens=200, matched_tokens=80, inserts=5, inserted_tokens=160, new_blocks=9,
    removed_blocks={"evicted": 3, "replaced": 1}, collisions=2, blocks={"gpu": 4, "cpu": 1}, nodes=5, locks=1,
    memory_bytes=4096, latency_ns=[[100, 60], [200, 38], [5000, 2]],
)  # fmt: skip


def test_rates():
    metrics = PrefixReuseMetrics.from_counters(COUNTERS)
    assert (metrics.token_hit_rate, metrics.lookup_hit_rate, metrics.mean_matched_length) == (0.4, 0.4, 20.0)
    assert (metrics.lookup_p50_ns, metrics.lookup_p99_ns) == (100, 5000)
    assert (metrics.cached_blocks, metrics.evicted_blocks) == ({"gpu": 4, "cpu": 1}, 3)


def test_what_was_not_measured_is_none(index):
    metrics = PrefixReuseMetrics.from_counters(index.metrics())
    assert metrics.token_hit_rate is metrics.lookup_hit_rate is metrics.mean_matched_length is None
    assert metrics.lookup_p50_ns is metrics.lookup_p99_ns is None
    assert "lookup_seconds{" not in metrics.to_prometheus()
    assert json.loads(metrics.to_json())["lookup_p50_ns"] is None


def test_of_every_index(index):
    index.insert([1, 2, 3, 4], [0, 1])
    for _ in range(64):
        index.lookup([1, 2, 9])
    index.evict_lru(1)
    metrics = PrefixReuseMetrics.from_counters(index.metrics())
    assert (metrics.lookups, metrics.hits, metrics.token_hit_rate, metrics.new_blocks) == (64, 64, 2 / 3, 2)
    assert metrics.removed_blocks == {"evicted": 1, "policy": 0, "invalidated": 0, "orphaned": 0, "replaced": 0}
    assert metrics.cached_blocks == {"gpu": 1, "cpu": 0, "nvme": 0}
    if metrics.lookup_p50_ns is not None:
        assert 0 < metrics.lookup_p50_ns <= metrics.lookup_p99_ns


@pytest.mark.parametrize(
    "histogram, share, expected",
    [
        ([], 0.5, None),
        ([[100, 0]], 0.5, None),
        ([[100, 1]], 0.5, 100),
        ([[100, 1], [200, 1]], 0.5, 100),
        ([[100, 1], [200, 2]], 0.5, 200),
        ([[100, 99], [200, 1]], 0.99, 100),
        ([[100, 98], [200, 2]], 0.99, 200),
        ([(100, 1), (float("inf"), 9)], 0.5, None),
    ],
)
def test_quantiles(histogram, share, expected):
    assert quantile(histogram, share) == expected


def test_json_has_fields_and_rates():
    found = json.loads(PrefixReuseMetrics.from_counters(COUNTERS).to_json())
    assert (found["lookups"], found["token_hit_rate"], found["removed_blocks"]["evicted"]) == (10, 0.4, 3)
    assert found["lookup_p99_ns"] == 5000


def test_prometheus():
    text = PrefixReuseMetrics.from_counters(COUNTERS).to_prometheus()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("sagellm_prefix_") and family.documentation.endswith(".")
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = (family.type, sample.value)
    assert found[("sagellm_prefix_lookups_total",)] == ("counter", 10)
    assert found[("sagellm_prefix_collisions_total",)] == ("counter", 2)
    assert found["sagellm_prefix_removed_blocks_total", "evicted"] == ("counter", 3)
    assert found["sagellm_prefix_cached_blocks", "cpu"] == ("gauge", 1)
    assert found[("sagellm_prefix_memory_bytes",)] == ("gauge", 4096)
    assert found["sagellm_prefix_lookup_seconds", "0.99"] == ("gauge", pytest.approx(5e-6))


def test_the_server_shows_them_beside_its_own():
    report = dict(
        blocks=dict.fromkeys(["free", "cached", "active", "host_used", "host_total"], 0), evicted={}, migrated={},
        prefix=dict.fromkeys(["query_tokens", "hit_tokens", "query_blocks", "hit_blocks"], 0), step_s=0.0, comm=[],
        preempted=0, enabled={}, calls=[], faults=[], prefix_index={},
    )  # fmt: skip
    report["prefix_retries"] = report["prefix"]
    without = [family.name for family in families(report)]
    shown = [family.name for family in families(report | {"prefix_index": COUNTERS})]
    ours = {f.name for f in text_string_to_metric_families(PrefixReuseMetrics.from_counters(COUNTERS).to_prometheus())}
    assert len(ours) > 5 and len(shown) == len(set(shown))
    assert set(shown) - set(without) == ours


def test_two_texts_do_not_meet():
    metrics = PrefixReuseMetrics.from_counters(COUNTERS)
    assert metrics.to_prometheus() == metrics.to_prometheus()


def test_metrics_are_frozen():
    metrics = PrefixReuseMetrics.from_counters(COUNTERS)
    with pytest.raises(ValidationError):
        metrics.lookups = 3


@pytest.mark.parametrize(
    "change",
    [dict(hits=11), dict(matched_tokens=201), dict(lookups=-1), dict(nodes="many"), dict(latency_ns=3), dict(odd=1)],
)
def test_impossible_counters(change):
    with pytest.raises(PrefixIndexError):
        PrefixReuseMetrics.from_counters(COUNTERS | change)


@pytest.mark.parametrize("name", COUNTERS)
def test_missing_counters(name):
    with pytest.raises(PrefixIndexError) as caught:
        PrefixReuseMetrics.from_counters({key: value for key, value in COUNTERS.items() if key != name})
    assert name in str(caught.value)
