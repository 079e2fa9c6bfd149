"""Engines beside the server's, each in a process of its own, that write points of skeleton-of-thought answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sagellm.accel.sot.group import Master, group_hooks
from sagellm.accel.sot.workers import KEY, MASTER, Workers, share_cores, start_workers, write_key
from sagellm.core.config import PDHooks, SageConfig
from sagellm.core.errors import ConfigError

__all__ = ["for_each_engine", "sot_hooks", "sot_workers"]

NOT_OF_WORKERS = {  # settings of the server alone
    "sot_workers": 0, "api_key": (), "record": None, "plugins": (), "kv": None, "host_kv_blocks": 0, "comm_metrics": False,
}  # fmt: skip


def for_each_engine(config: SageConfig, device: str) -> SageConfig:
    """Return settings of each engine of such a server.

    Raises:
        ConfigError: keys and values of this device cannot be moved between engines here.
    """
    if device != "cpu":
        raise ConfigError(f"--sot-workers needs the CPU device; this is {device}. Leave it out, or give --device cpu.")
    return share_cores(config, config.sot_workers)


def sot_hooks(run_dir: Path) -> PDHooks:
    """Return settings with which the server's engine keeps keys and values for workers. Writes the key of the group."""
    return group_hooks(MASTER, write_key(run_dir))


@contextmanager
def sot_workers(config: SageConfig, engine: Any, run_dir: Path) -> Iterator[Master]:
    """Start the workers, start each again that is lost, and end them after the context.

    Args:
        engine: LMDeploy's `AsyncEngine`, whose engine was opened with `sot_hooks(run_dir)`.

    Raises:
        PeerError: a worker did not start.
    """
    address = ""
    while not address:  # its control connections come with the first turn of its loop
        address = engine.get_schedule_metrics().sage["pd"]["address"]
    own = config.model_copy(update=NOT_OF_WORKERS)
    with start_workers(address, run_dir / KEY, own, config.sot_workers) as workers:
        workers.keep()
        REGISTRY.register(_Collector(workers))
        yield workers.master


class _Collector:
    """Numbers of workers for `/metrics`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def describe(self) -> list[Metric]:
        """Empty, so that registration does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        workers = self._workers
        text = "Workers of skeleton-of-thought that live."
        yield GaugeMetricFamily("sagellm_sot_workers", text, workers.master.num_workers)
        text = "Workers that were lost: their process or their engine ended, or went on no more."
        yield CounterMetricFamily("sagellm_sot_worker_losses", text, workers.num_lost)
        text = "Processes of workers that were started in place of others."
        yield CounterMetricFamily("sagellm_sot_worker_restarts", text, workers.num_restarted)
