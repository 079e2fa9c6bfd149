"""Figures of the manager and its gateway, for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sagellm.core.config import ROLES

__all__ = ["GatewayMetrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
KINDS = ("split", "load", "stay")  # reasons of the decisions inside a group


class GatewayMetrics:
    """Counters of one manager, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common = {"registry": self.registry}
        self.requests = Counter(
            "sagellm_gateway_requests", "Requests, by engine and by what became of them.", ["engine", "outcome"], **common
        )
        self.choices = Counter(
            "sagellm_gateway_choices", "Choices of an engine.", ["engine", "router", "reason"], **common
        )  # fmt: skip
        self.retries = Counter("sagellm_gateway_retries", "Requests sent again to another engine.", ["cause"], **common)
        self.limited = Counter("sagellm_gateway_limited", "Requests refused by the limit of their key.", **common)
        self.router_faults = Counter("sagellm_gateway_router_faults", "Routers that were switched off.", **common)
        self.failures = Counter("sagellm_gateway_failures", "Requests that an engine failed.", ["engine", "cause"], **common)
        self.first_byte = Histogram(
            "sagellm_gateway_first_byte_seconds", "From a request to the first byte back, by the decision of a group.",
            ["kind"], buckets=SECONDS, **common,
        )  # fmt: skip
        self.running = Gauge("sagellm_gateway_running_requests", "Requests that are being answered.", **common)
        self.engines = Gauge("sagellm_control_engines", "Engines, by state.", ["state"], **common)
        self.load = Gauge(
            "sagellm_control_engine_load", "Figures of an engine's load, as it last said.",
            ["engine", "group", "role", "figure"], **common,
        )  # fmt: skip
        self.prefill_failures = Counter(
            "sagellm_gateway_prefill_failures", "Prompts that were computed again, by prefill engine and cause.",
            ["engine", "cause"], **common,
        )  # fmt: skip
        self.checks = Counter("sagellm_control_health_checks", "Health checks, by result.", ["engine", "result"], **common)
        self.share = Gauge("sagellm_control_health_share", "Share of health checks that succeeded; 1 before any.", **common)
        self.scaling_target = Gauge("sagellm_scaling_target_engines", "Engines that a pool is to have.", ["pool"], **common)
        self.scaling_decisions = Counter(
            "sagellm_scaling_decisions", "Decisions on the number of engines: up, down, keep.", ["pool", "action"], **common
        )
        self.scaling_faults = Counter(
            "sagellm_scaling_faults", "Scaling policies that were switched off.", ["pool"], **common
        )
        self.start_s = Gauge("sagellm_control_start_seconds", "Time to start the manager, without engines.", **common)
        self.register_s = Gauge("sagellm_control_register_seconds", "Time to register an engine.", ["engine"], **common)
        self.share.set(1.0)
        self.choice = _Children(self.choices)
        self._has_proxy_names = False

    def show_proxy_names(self, fleet: Any) -> None:
        """Show the figures by the names of `sagellm pd proxy` too. `fleet`: the `Fleet` of its engines."""
        if not self._has_proxy_names:
            self._has_proxy_names = True
            self.registry.register(_ProxyNames(self, fleet))

    def health_share(self) -> float:
        samples = [each for family in self.checks.collect() for each in family.samples if each.name.endswith("_total")]
        total = sum(each.value for each in samples)
        return sum(each.value for each in samples if each.labels["result"] == "ok") / total if total else 1.0

    def text(self) -> bytes:
        self.share.set(self.health_share())
        return generate_latest(self.registry)


class _Children(dict[tuple[str, ...], Counter]):
    """Labels -> counter with these. `Counter.labels` takes 2 us, and longer among thousands of engines."""

    def __init__(self, of: Counter) -> None:
        self._of = of

    def __missing__(self, labels: tuple[str, ...]) -> Counter:
        self[labels] = self._of.labels(*labels)
        return self[labels]


class _ProxyNames:
    """The figures of a gateway by the names that `sagellm pd proxy` has for them. Nothing is counted a second time."""

    def __init__(self, metrics: GatewayMetrics, fleet: Any) -> None:
        self._metrics, self._fleet = metrics, fleet

    def collect(self) -> Iterator[Metric]:
        mine = self._metrics
        choices, faults = _summed(mine.choices, "reason"), _summed(mine.router_faults, "")[""]
        decisions = {(kind,): choices.get(kind, 0.0) for kind in KINDS}
        sides = (("prefill", mine.prefill_failures), ("decode", mine.failures))
        failures = {(side, cause): num for side, counter in sides for cause, num in _summed(counter, "cause").items()}
        there = [one.kind.role for one in self._fleet.engines.values() if one.kind.group and one.state == "ready"]
        engines = {(role,): there.count(role) for role in ROLES}
        outcomes, causes = ({(key,): num for key, num in _summed(counter, label).items()}
                            for counter, label in ((mine.requests, "outcome"), (mine.retries, "cause")))  # fmt: skip
        for name, words, labels, values in (
            ("sagellm_proxy_requests", "Requests, by what became of them.", ["outcome"], outcomes),
            ("sagellm_proxy_decisions", "Routing decisions: split, load, stay.", ["kind"], decisions),
            ("sagellm_proxy_retries", "Requests sent again to an engine that decodes.", ["cause"], causes),
            ("sagellm_proxy_failures", "Requests to engines that failed, by side and cause.", ["side", "cause"], failures),
            ("sagellm_proxy_policy_faults", "Routing policies that were switched off.", [], {(): faults}),
        ):
            yield _filled(CounterMetricFamily(name, words, labels=labels), values)
        yield _filled(GaugeMetricFamily("sagellm_proxy_engines", "Engines that have joined.", labels=["role"]), engines)
        (first_byte,), (running,) = mine.first_byte.collect(), mine.running.collect()
        yield _renamed(first_byte, "sagellm_proxy_first_byte_seconds")
        yield _renamed(running, "sagellm_proxy_running_requests")


def _summed(counter: Counter, label: str) -> dict[str, float]:
    """Return value of a label -> sum of the samples that have it."""
    found: dict[str, float] = {}
    for one in counter.collect()[0].samples:
        if one.name.endswith("_total"):
            key = one.labels.get(label, "")
            found[key] = found.get(key, 0.0) + one.value
    return found


def _filled(family: Any, values: Mapping[tuple[str, ...], float]) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _renamed(family: Metric, name: str) -> Metric:
    found = Metric(name, family.documentation, family.type)
    found.samples = [one._replace(name=one.name.replace(family.name, name)) for one in family.samples]
    return found
