"""Component scenarios: one contract for all, found by their files' names alone."""

import math
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import benchmarks.scenarios
from benchmarks.errors import BenchmarkError
from benchmarks.gate import judge
from benchmarks.gate.base import Rule
from benchmarks.metrics.definitions import DEFINITIONS
from benchmarks.result import Definition, read_result
from benchmarks.runner import main
from benchmarks.scenarios import component, component_names

# Small enough for a test; a scenario that is not here runs with its own defaults.
SMALL: dict[str, dict[str, Any]] = {
    "collective": {"rounds": 2, "operations": 4},
    "comm_fusion": {"kib": [], "tensors": 3},
    "comm_overhead": {"kib": [], "operations": 3},
    "comm_share": {"hidden": 64, "layers": 2, "batch": 2, "prompt_tokens": 8, "new_tokens": 4, "bursts": 1},
    "comm_transfer": {"mib": [], "rounds": 2, "pings": 20},
    "control_message": {"calls": 50, "at_once": 4},
    "hook_call": {"calls": 5, "notices_per_call": 2},
    "kv_migration": {"disk_kib": 4, "disk_blocks": 2},
    "kv_policy": {"num_objects": 500, "num_requests": 2000, "num_rows": 50},
    "kv_transfer": {"mib": [], "blocks": 3},
    "pd_answers": {"requests": 6, "alone": 2},
    "pd_faults": {"requests": 20, "seconds": 20.0, "kill_every_s": 8.0, "texts": 5, "warm_up": 1},
    "pd_interference": {"prompts": 10, "prompt_tokens": 300, "repeats": 1},
    "plan_build": {"num_requests": 16, "repeats": 2},
    "prefix_index": {"num_sequences": 40, "num_lookups": 8},
    "prefix_eviction": {"num_leaves": 200},
    "prefix_readers": {"num_tokens": 1024, "rounds": 1, "seconds": 0.01},
    "prefix_schedule": dict(num_blocks=200, num_requests=2, num_requests_found=4, num_blocks_found=300, concurrency=2),
    "quantized": {"tokens": 1024, "batch": 2, "prompt_tokens": 8, "new_tokens": 5, "bursts": 1},
    "speculative_propose": {"num_steps": 2, "twin_steps": 1, "shorten": 64},
    "victim_choice": {"num_blocks": 40, "count": 4, "depth": 4, "repeats": 2},
}
DROPPED_IN = """
from benchmarks.result import Definition

OPTIONS = {"size": 3}
DEFINITIONS = {"dropped_in_sum": Definition(unit="1", better=None, text="Seed and size.")}


def run(seed, size):
    return {"dropped_in_sum": float(seed + size)}
"""


@pytest.fixture
def dropped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a scenario whose file was put into a second folder of the package."""
    (tmp_path / "dropped_in.py").write_text(DROPPED_IN)
    monkeypatch.setattr(benchmarks.scenarios, "__path__", [*benchmarks.scenarios.__path__, str(tmp_path)])
    yield "dropped_in"
    sys.modules.pop("benchmarks.scenarios.dropped_in", None)


def test_shipped_components():
    assert {"hook_call", "victim_choice"} <= set(component_names())
    assert not {"base", "serve"} & set(component_names())


# Groups of real engines, and ranks that load torch anew.
SLOW = {
    "pd_answers", "pd_faults", "pd_interference",
    "collective", "comm_fusion", "comm_overhead", "comm_share", "comm_transfer", "kv_transfer", "quantized",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in component_names()]
)
def test_contract(name: str):
    module = component(name, {})
    assert module.DEFINITIONS and isinstance(module.OPTIONS, dict)
    for metric, definition in module.DEFINITIONS.items():
        assert isinstance(definition, Definition) and definition.text and definition.unit
        assert metric.startswith(name.split("_")[0]), f"{metric} does not tell that it is of {name}"
        assert metric not in DEFINITIONS
    options = module.OPTIONS | SMALL.get(name, {})
    assert component(name, options) is module
    metrics = module.run(1, **options)
    assert metrics.keys() == module.DEFINITIONS.keys()
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_names_of_metrics_are_of_one_scenario_only():
    names = [metric for name in component_names() for metric in component(name, {}).DEFINITIONS]
    assert len(names) == len(set(names))


def test_a_file_is_all_it_takes(dropped_in: str):
    assert dropped_in in component_names()
    module = component(dropped_in, {"size": 4})
    assert module.run(5, **(module.OPTIONS | {"size": 4})) == {"dropped_in_sum": 9.0}


def test_unknown_scenarios_are_told_the_known_ones(dropped_in: str):
    with pytest.raises(BenchmarkError, match="'nothing' is unknown; known are serve, ") as caught:
        component("nothing", {})
    assert all(name in str(caught.value) for name in component_names())
    assert dropped_in in str(caught.value)


@pytest.mark.parametrize("name", ["base", "serve", "..config", ""])
def test_what_else_lies_in_the_folder_is_no_component(name: str):
    with pytest.raises(BenchmarkError, match="is unknown"):
        component(name, {})


def test_unknown_options_are_told_the_known_ones():
    with pytest.raises(BenchmarkError, match="hook_call has no options colour, hue; allowed: calls, notices_per_call"):
        component("hook_call", {"hue": 1, "calls": 2, "colour": 1})


@pytest.mark.slow
def test_components_of_contestants_are_measured_in_turn(tmp_path: Path):
    sides = "[{name: base}, {name: head}]"
    text = f"name: parts\nrounds: 3\ncontestants: {sides}\ncomponents: {{hook_call: {SMALL['hook_call']}}}\n"
    (tmp_path / "config.yaml").write_text(text)
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["--config", str(tmp_path / "config.yaml"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    result = read_result(out / "result.json")
    assert [run.contestant for run in result.runs] == ["base", "head", "head", "base", "head", "base"]
    metric = next(iter(component("hook_call", {}).DEFINITIONS))
    rule = Rule(scenario="hook_call", metric=metric, better="lower", relative=0.1)
    assert judge(result, rules=(rule,)).metrics[0].change.num_head == 3


def test_a_component_that_fails_says_why_and_the_others_go_on(tmp_path: Path):
    components = {"hook_call": SMALL["hook_call"] | {"calls": "many"}, "victim_choice": SMALL["victim_choice"]}
    (tmp_path / "config.yaml").write_text(f"name: parts\nrounds: 1\ncomponents: {components}\n")
    out = tmp_path / "out"
    CliRunner().invoke(main, ["--config", str(tmp_path / "config.yaml"), "--out", str(out)])
    failed, valid = read_result(out / "result.json").runs
    assert (failed.status, valid.status) == ("failed", "valid")
    assert failed.reason.startswith("hook_call ended with code 1: ") and "Error" in failed.reason


def test_components_alone_make_a_result(tmp_path: Path):
    parts = {name: SMALL[name] for name in ("hook_call", "victim_choice")}
    (tmp_path / "config.yaml").write_text(f"name: parts\nrounds: 2\nseed: 3\ncomponents: {parts}\n")
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["--config", str(tmp_path / "config.yaml"), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    result = read_result(out / "result.json")
    assert result.status == "complete"
    assert [(run.scenario, run.round, run.seed, run.status) for run in result.runs] == [
        (name, number, 3000 + number, "valid") for number in range(2) for name in parts
    ]
    assert result.definitions.keys() == {metric for name in parts for metric in component(name, {}).DEFINITIONS}
    assert click.unstyle(done.stdout).strip() == result.model_dump_json(by_alias=True)
    assert all(name in (out / "report.md").read_text() for name in parts)
