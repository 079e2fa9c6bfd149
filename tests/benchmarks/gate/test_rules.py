"""Rule files: what they change, and what is refused, one line a mistake."""

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.gate import DEFAULT_RULES, load_rules


def load(tmp_path, text):
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return {rule.name: rule for rule in load_rules(file)}


def test_the_thresholds_that_users_named():
    limits = {rule.name: (rule.better, rule.relative) for rule in DEFAULT_RULES}
    assert limits["mfu"] == ("higher", 0.01)
    assert {limits[name] for name in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")} == {("lower", 0.05)}
    assert limits["kv_hit_rate_tokens"][0] == limits["kv_hit_rate_blocks"][0] == "higher"
    assert limits["comm_share"][0] == limits["cost_per_mtok"][0] == limits["device_s_per_mtok"][0] == "lower"
    assert all(rule.gated and rule.absolute > 0 for rule in DEFAULT_RULES)


def test_a_file_changes_and_extends_the_rules(tmp_path):
    rules = load(
        tmp_path,
        "metrics:\n"
        "  ttft_p50_s: {relative: 0.08}\n"
        "  mfu: {gated: false, reason: no peak}\n"
        "  prefix_index/lookup_s: {relative: 0.1, better: lower}\n",
    )
    assert (rules["ttft_p50_s"].relative, rules["ttft_p50_s"].absolute) == (0.08, 1e-3)
    assert not rules["mfu"].gated and rules["mfu"].reason == "no peak"
    added = rules["prefix_index/lookup_s"]
    assert (added.scenario, added.metric, added.absolute) == ("prefix_index", "lookup_s", 0.0)
    assert len(rules) == len(DEFAULT_RULES) + 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("metrics: {mfu: {limit: 0.1}}", "mfu: limit: unknown key; known are absolute, better"),
        ("metrics: {mfu: {relative: much}}", "mfu: relative: .*got 'much'"),
        ("metrics: {mfu: {relative: 0}}", "mfu: relative: .*greater than 0"),
        ("metrics: {mfu: {interest: 0.5}}", "mfu: interest: "),
        ("metrics: {mfu: {gated: false}}", "mfu: gated: false needs a reason"),
        ("metrics: {mfu: {gated: false, reason: ' '}}", "mfu: gated: false needs a reason"),
        ("metrics: {mfu: 0.1}", "mfu: a rule is keys and values, got 0.1"),
        ("metrics: {mfu: {metric: ttft}}", "mfu: metric is part of the name"),
        ("metrics: {latency: {relative: 0.1}}", "latency: unknown; known are mfu, ttft_p50_s"),
        ("metrics: {index/lookup_s: {relative: 0.1}}", "index/lookup_s: better: needed"),
        ("metrics: [mfu]", "must hold one key, metrics"),
        ("mfu: {relative: 0.1}", "must hold one key, metrics"),
        ("", "must hold one key, metrics"),
        ("metrics: {", "is no YAML"),
    ],
)
def test_mistakes(tmp_path, text, told):
    with pytest.raises(BenchmarkError, match=told) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_every_mistake_has_a_line(tmp_path):
    with pytest.raises(BenchmarkError) as caught:
        load(tmp_path, "metrics: {mfu: {limit: 1, relative: -1}, latency: {}}")
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BenchmarkError, match="cannot read"):
        load_rules(tmp_path / "none.yaml")
