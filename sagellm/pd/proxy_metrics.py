"""Counters of the proxy for Prometheus, and a JSON line for each decision and each end of a request."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sagellm.core.errors import ConfigError

__all__ = ["ProxyMetrics", "RequestLines"]

logger = logging.getLogger("sagellm.pd")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ProxyMetrics:
    """Counters of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common = {"registry": self.registry}
        self.requests = Counter("sagellm_proxy_requests", "Requests, by what became of them.", ["outcome"], **common)
        self.decisions = Counter("sagellm_proxy_decisions", "Routing decisions: split, load, stay.", ["kind"], **common)
        self.retries = Counter("sagellm_proxy_retries", "Requests sent again to an engine that decodes.", ["cause"], **common)
        self.failures = Counter(
            "sagellm_proxy_failures", "Requests to engines that failed, by side and cause.", ["side", "cause"], **common
        )
        self.first_byte = Histogram(
            "sagellm_proxy_first_byte_seconds", "From a request to the first byte back.", ["kind"], buckets=SECONDS, **common
        )
        self.running = Gauge("sagellm_proxy_running_requests", "Requests that are being answered.", **common)
        self.engines = Gauge("sagellm_proxy_engines", "Engines that have joined.", ["role"], **common)
        self.policy_faults = Counter("sagellm_proxy_policy_faults", "Routing policies that were switched off.", **common)
        for kind in ("split", "load", "stay"):  # a counter that is not there cannot be told from one at zero
            self.decisions.labels(kind)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class RequestLines:
    """A JSON object a line: each decision with its reason, and the end of each request. To the log, and to `path` if given.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None
        if path is not None:
            try:
                self._file = path.open("a", buffering=1)
            except OSError as error:
                raise ConfigError(f"cannot write --record {path}: {error.strerror}.") from None

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "t_s": round(time.time(), 6)} | fields)
        logger.info("%s", line)
        if self._file is not None:
            try:
                self._file.write(line + "\n")
            except OSError as error:  # a full disk is no reason to lose requests
                logger.error("--record is not written any more: %s", error.strerror)
                self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
