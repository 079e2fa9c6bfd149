"""The definitions are complete, and the committed documents are what the code makes."""

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.metrics.definitions import DEFINITIONS, document, grouped
from benchmarks.result import json_schema

DOCS = Path(benchmarks.__file__).parent / "docs"


def test_all_are_there():
    latencies = {f"{name}_p{number}_s" for name in ("ttft", "tpot", "itl", "e2e") for number in (50, 95, 99)}
    others = (
        "output_tokens_per_s requests_per_s goodput_rps mfu kv_hit_rate_tokens kv_hit_rate_blocks kv_hit_rate_retries "
        "preemptions comm_share spec_acceptance spec_mean_accepted spec_tokens_per_step device_s_per_mtok cost_per_mtok "
        "peak_memory_bytes failed_requests"
    )
    assert DEFINITIONS.keys() == latencies | set(others.split())


def test_percentiles_are_grouped():
    groups = [names for names, _ in grouped(DEFINITIONS)]
    assert groups[0] == ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s"]
    assert sorted(name for names in groups for name in names) == sorted(DEFINITIONS)


@pytest.mark.parametrize("word", ["first_s - sent_s", "lag", "refused"])
def test_ttft_says_what_it_counts_from(word: str):
    assert word in DEFINITIONS["ttft_p95_s"].text


def test_metrics_page_is_up_to_date():
    assert (DOCS / "metrics.md").read_text() == document(), "run the command that the page's first lines name"


def test_schema_is_up_to_date():
    committed = json.loads((DOCS / "result.schema.json").read_text())
    assert committed == json_schema(), "python -m benchmarks.result > benchmarks/docs/result.schema.json"
