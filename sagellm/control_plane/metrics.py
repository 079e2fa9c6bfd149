"""Figures of the manager and its gateway, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sagellm.pd.proxy_metrics import SECONDS

__all__ = ["GatewayMetrics"]


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
        self.first_byte = Histogram(
            "sagellm_gateway_first_byte_seconds", "From a request to the first byte back.", buckets=SECONDS, **common
        )
        self.running = Gauge("sagellm_gateway_running_requests", "Requests that are being answered.", **common)
        self.engines = Gauge("sagellm_control_engines", "Engines, by state.", ["state"], **common)
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

    def health_share(self) -> float:
        samples = [each for family in self.checks.collect() for each in family.samples if each.name.endswith("_total")]
        total = sum(each.value for each in samples)
        return sum(each.value for each in samples if each.labels["result"] == "ok") / total if total else 1.0

    def text(self) -> bytes:
        self.share.set(self.health_share())
        return generate_latest(self.registry)
