"""The thresholds that users named, and the YAML file that may change them:

    metrics:
      ttft_p50_s: {relative: 0.08}
      mfu: {gated: false, reason: "the peak of this machine is not known"}
      prefix_index/lookup_s: {relative: 0.10, absolute: 1.0e-7, better: lower}

The last is a metric of another scenario.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.config import read_yaml
from benchmarks.errors import BenchmarkError
from benchmarks.gate.base import Rule

Rules = tuple[Rule, ...]

# "Not lower", "not higher" and "not worse" still need a smallest change that counts, or rounding would fail a pull request.
# Where it is far below what a few runs resolve, `interest` says what a pass excludes.
DEFAULT_RULES: Rules = (
    Rule(metric="mfu", better="higher", relative=0.01, absolute=2e-4, interest=5),
    Rule(metric="ttft_p50_s", better="lower", relative=0.05, absolute=1e-3),
    Rule(metric="ttft_p95_s", better="lower", relative=0.05, absolute=1e-3),
    Rule(metric="tpot_p50_s", better="lower", relative=0.05, absolute=1e-4),
    Rule(metric="tpot_p95_s", better="lower", relative=0.05, absolute=1e-4),
    Rule(metric="kv_hit_rate_tokens", better="higher", relative=0.005, absolute=0.002, interest=5, scale="difference"),
    Rule(metric="kv_hit_rate_blocks", better="higher", relative=0.005, absolute=0.002, interest=5, scale="difference"),
    Rule(metric="comm_share", better="lower", relative=0.02, absolute=0.002, interest=5, scale="difference"),
    Rule(
        scenario="comm_share", metric="comm_share_reported", better="lower", relative=0.02, absolute=0.002, interest=5,
        scale="difference",
    ),
    Rule(scenario="collective", metric="collective_vs_copy", better="lower", relative=0.05, absolute=0.05, interest=3),
    Rule(scenario="quantized", metric="quantized_kl", better="lower", relative=0.02, absolute=1e-5, interest=5),
    Rule(scenario="quantized", metric="quantized_step_s", better="lower", relative=0.05, absolute=1e-4),
    Rule(metric="cost_per_mtok", better="lower", relative=0.01, absolute=1e-6, interest=5),
    Rule(metric="device_s_per_mtok", better="lower", relative=0.01, absolute=0.1, interest=5),
)


def load_rules(file: Path) -> Rules:
    """The default rules as `file` changes and extends them. Raises BenchmarkError, one line a mistake."""
    values = read_yaml(file)
    if not isinstance(values, dict) or set(values) != {"metrics"} or not isinstance(values["metrics"], dict):
        raise BenchmarkError(f"{file} must hold one key, metrics, with a rule for each metric's name")
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    mistakes: list[str] = []
    for name, changes in values["metrics"].items():
        try:
            rules[str(name)] = _rule(str(name), rules.get(str(name)), changes)
        except ValidationError as error:
            mistakes += [f"{file}: {name}: {line}" for line in _explain(error)]
        except ValueError as error:
            mistakes.append(f"{file}: {name}: {error}")
    if mistakes:
        raise BenchmarkError("\n".join(mistakes))
    return tuple(rules.values())


def _rule(name: str, known: Rule | None, changes: Any) -> Rule:
    """Raises ValueError, pydantic's among them."""
    if not isinstance(changes, dict):
        raise ValueError(f"a rule is keys and values, got {changes!r}")
    if taken := {"scenario", "metric"} & set(changes):
        raise ValueError(f"{min(taken)} is part of the name, not a key")
    scenario, _, metric = name.rpartition("/")
    if known is None and not scenario:
        names = ", ".join(rule.name for rule in DEFAULT_RULES)
        raise ValueError(f"unknown; known are {names}; another scenario's is written scenario/metric")
    values = known.model_dump() if known else {"scenario": scenario, "metric": metric}
    return Rule(**{**values, **changes})


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = ", ".join(sorted(set(Rule.model_fields) - {"scenario", "metric"}))
            lines.append(f"{key}: unknown key; known are {known}")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        elif item["type"] == "missing":
            lines.append(f"{key}: needed for a metric that has no default rule")
        else:
            lines.append(f"{key}: {item['msg']}, got {item['input']!r}")
    return lines
