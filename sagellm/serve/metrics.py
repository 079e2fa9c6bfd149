"""Counters of the engine process, among LMDeploy's own Prometheus metrics."""

import logging
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)

from sagellm.core.hooks import BlockCounts
from sagellm.prefix_reuse import PrefixReuseMetrics
from sagellm.serve.comm_metrics import comm_families
from sagellm.serve.pd_metrics import pd_families

logger = logging.getLogger("sagellm")

FORKS = {
    "branches": "Requests that came as branches of others.",
    "shared_tokens": "Tokens that branches did not compute when they started.",
    "copied_blocks": "Blocks that were copied for branches.",
}

MAX_REPORTED = 2000  # numbers of a plug-in; a page of 200,000 takes seconds
_CUT: set[str] = set()  # plug-ins that were said to report more


def register(engine: Any) -> "EngineCollector":
    """Add a collector that asks LMDeploy's `AsyncEngine` at every scrape, and return it."""
    collector = EngineCollector(engine)
    REGISTRY.register(collector)
    return collector


class EngineCollector:
    """Fetches the report of `SchedulerHooks` and turns it into metric families."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Empty, so that registration does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._engine.get_schedule_metrics().sage
        if report is not None:
            yield from families(report)


class TurboMindCollector(EngineCollector):
    """The blocks from the engine's own counters, the rest from `TurboMindHooks`."""

    def __init__(self, engine: Any, hooks: Any) -> None:
        super().__init__(engine)
        self._hooks = hooks

    def collect(self) -> Iterator[Metric]:
        own = self._engine.get_schedule_metrics()
        cached = own.total_blocks - own.active_blocks - own.free_blocks
        blocks = BlockCounts(own.total_blocks, own.free_blocks, cached, own.active_blocks)
        report = self._hooks.report() | {"blocks": blocks._asdict()}
        yield from families(report)
        table = {kind: report["table"][kind] for kind in ("decisions", "replays", "divergences", "refused")}
        yield _counter("sagellm_hook_table_calls", "Calls of the hook table, by what became of them.", "kind", table)
        notices = {kind: report["port"][kind] for kind in ("told", "lost")}
        yield _counter("sagellm_plugin_notices", "Notices for plug-ins: told, and lost of them.", "kind", notices)


def families(report: dict[str, Any]) -> Iterator[Metric]:
    """Metric families of one report. TurboMind's has no retries, migrations, preemptions and step times."""
    blocks = report["blocks"]
    states = {state: blocks[state] for state in ("free", "cached", "active")}
    yield _gauge("sagellm_kv_blocks", "Blocks of the KV pool by state.", "state", states)
    host = {"used": blocks["host_used"], "free": blocks["host_total"] - blocks["host_used"]}
    yield _gauge("sagellm_host_kv_blocks", "Slots of the host tier by state.", "state", host)
    yield _counter("sagellm_evicted_blocks", "Blocks given up, by reason.", "reason", report["evicted"])
    if "migrated" in report:
        yield _counter("sagellm_migrated_blocks", "Blocks moved, by the tier moved to.", "tier", report["migrated"])
    if "pool" in report:
        yield from _pool(report["pool"])
    yield from _lookups(report)
    if report.get("prefix_index"):
        yield from PrefixReuseMetrics.from_counters(report["prefix_index"]).families()
    if "step_s" in report:
        yield CounterMetricFamily("sagellm_step_seconds", "Wall-clock time with a step running.", value=report["step_s"])
    yield from comm_families(report["comm"], report.get("step_s"), report.get("comm_choice"))
    if "grammars" in report:
        text = "Regular expressions that were compiled before a request asked for them."
        yield CounterMetricFamily("sagellm_grammars_ahead", text, value=report["grammars"])
    if "preempted" in report:
        yield CounterMetricFamily("sagellm_preemptions", "Running requests sent back.", value=report["preempted"])
    if "chunks" in report:
        yield CounterMetricFamily(
            "sagellm_prompt_cuts", "Times that a prompt was left off for another step.", value=report["chunks"]
        )
    if report.get("ahead") is not None:
        text = "Decode steps that ran before the engine asked for them, by whether it did."
        yield _counter("sagellm_steps_ahead", text, "result", report["ahead"])
    if "forks" in report:
        for name, text in FORKS.items():
            yield CounterMetricFamily(f"sagellm_{name}", text, value=report["forks"][name])
    if report.get("speculation") is not None:
        yield from _guesses(report["speculation"])
    if report.get("sparsity") is not None:
        yield from _blocks_read(report["sparsity"])
    if report.get("pd") is not None:
        yield from pd_families(report["pd"])
    yield _gauge(
        "sagellm_plugin_enabled", "1 while the plug-in is called, 0 once switched off.", "plugin", report["enabled"]
    )
    yield _reported(report.get("plugins", {}))
    calls = CounterMetricFamily("sagellm_plugin_calls", "Hook calls answered.", labels=["plugin", "hook"])
    for (plugin, hook), number in _summed(report["calls"], 2).items():
        calls.add_metric([plugin, hook], number)
    yield calls
    faults = CounterMetricFamily(
        "sagellm_plugin_faults", "Why plug-ins were switched off.", labels=["plugin", "hook", "kind"]
    )
    for (plugin, hook, kind), number in _summed(report["faults"], 3).items():
        faults.add_metric([plugin, hook, kind], number)
    yield faults


def _reported(plugins: dict[str, dict[str, Any]]) -> Metric:
    """Reports of plug-ins: `kind` is the outermost key, `key` the others, joined.

    Counters and gauges alike, which a report does not tell apart; so the type is unknown. The first
    `MAX_REPORTED` numbers of a plug-in are shown.
    """
    family = UnknownMetricFamily("sagellm_plugin_value", "Reports of plug-ins.", labels=["plugin", "kind", "key"])
    for plugin, values in plugins.items():
        leaves = _leaves(values)
        for path, value in islice(leaves, MAX_REPORTED):
            family.add_metric([plugin, path[0], "/".join(path[1:])], value)
        if next(leaves, None) is not None and plugin not in _CUT:
            _CUT.add(plugin)
            logger.warning("plug-in %s reports more than %d numbers; /metrics shows the first", plugin, MAX_REPORTED)
    return family


def _leaves(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _guesses(report: dict[str, Any]) -> Iterator[Metric]:
    """Families of a speculative strategy. Tokens of a sequence in a decode step are 1 + accepted / sequence steps."""
    kinds = ("drafted", "accepted")
    yield _counter(
        "sagellm_speculative_tokens", "Guesses that were computed, and right.", "kind", {kind: report[kind] for kind in kinds}
    )
    places = CounterMetricFamily("sagellm_speculative_place_tokens", "The same by place, from 1 on.", labels=["kind", "place"])
    for kind in kinds:
        for place, number in enumerate(report[f"{kind}_at"], 1):
            places.add_metric([kind, str(place)], number)
    yield places
    steps = {"all": report["sequences"], "guessed": report["guessed"], "tree": report["trees"]}
    text = "Decode steps of sequences: all, with guesses, and with guesses that are a tree."
    yield _counter("sagellm_speculative_sequence_steps", text, "kind", steps)
    spent = {"propose": report["propose_s"], "step": report["step_s"]}
    yield _counter("sagellm_speculative_seconds", "Seconds of guessing, and of the decode steps.", "part", spent)
    yield CounterMetricFamily(
        "sagellm_speculative_faults", "Requests that a mistake of the strategy left without guesses.", value=report["faults"]
    )


def _blocks_read(report: dict[str, Any]) -> Iterator[Metric]:
    """Families of a sparse policy."""
    blocks = {"read": report["read"], "held": report["held"]}
    yield _counter("sagellm_sparse_blocks", "KV blocks that decode steps read, and that their sequences held.", "kind", blocks)
    blocks = {"read": report["prompt_read"], "held": report["prompt_held"]}
    text = "KV blocks that tiles of prompts read, in the mean of layers and heads, and that lay before them."
    yield _counter("sagellm_sparse_prompt_blocks", text, "kind", blocks)
    yield CounterMetricFamily("sagellm_sparse_steps", "Decode steps that asked the sparse policy.", value=report["steps"])
    text = "1 while the sparse policy is asked, 0 once switched off."
    yield GaugeMetricFamily("sagellm_sparse_enabled", text, not report["fault"])


def _pool(report: dict[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily("sagellm_kv_utilization", "Share of the pool's blocks that are not free.", report["utilization"])
    text = "Share of the token slots in allocated blocks that hold no token."
    yield GaugeMetricFamily("sagellm_kv_fragmentation", text, report["fragmentation"])
    yield GaugeMetricFamily("sagellm_kv_reserved_blocks", "Blocks of the pool that plug-ins allocated.", report["reserved"])
    text = "Duration of calls of plug-ins that allocate, free or migrate blocks."
    family = HistogramMetricFamily("sagellm_kv_operation_seconds", text, labels=["operation"])
    for name, row in report["latencies"].items():
        bounds = [*map(str, row["bounds_s"]), "+Inf"]
        family.add_metric([name], list(zip(bounds, accumulate(row["counts"]), strict=True)), row["sum_s"])
    yield family
    for at, unit in enumerate(("bytes", "seconds")):
        text = f"{unit.capitalize()} of copies between pool and host tier, in passes that copied one way."
        values = {name: row[at] for name, row in report["copied"].items()}
        yield _counter(f"sagellm_kv_migration_{unit}", text, "direction", values)


def _lookups(report: dict[str, Any]) -> Iterator[Metric]:
    for unit in ("tokens", "blocks"):
        text = f"{unit.capitalize()} of prefix lookups, asked for and found: first ones, and after a loss of blocks."
        family = CounterMetricFamily(f"sagellm_prefix_{unit}", text, labels=["kind", "admission"])
        for admission, key in (("first", "prefix"), ("retry", "prefix_retries")):
            for kind in ("query", "hit") if key in report else ():
                family.add_metric([kind, admission], report[key][f"{kind}_{unit}"])
        yield family


def _summed(rows: list[list[Any]], num_labels: int) -> dict[tuple, float]:
    """Rows of several processes may carry the same labels."""
    total: dict[tuple, float] = {}
    for row in rows:
        labels = tuple(row[:num_labels])
        total[labels] = total.get(labels, 0) + row[num_labels]
    return total


def _gauge(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def _counter(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=[label]), values)


def _filled(family: Any, values: dict[str, Any]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
