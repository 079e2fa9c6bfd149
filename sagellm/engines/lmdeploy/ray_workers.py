"""Tensor-parallel workers that are actors of Ray, on one machine or on several: where they run, and a watch over them."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sagellm.comm_backend.config import NODES_WAIT_S, check_ray_address
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError
from sagellm.engines.lmdeploy.workers import END_S, HANG_S, LOOK_S, LOST_S, Watch, hangs

__all__ = ["RayWatch", "check_ray", "set_ray", "wait_for_nodes"]

LATE_S = 15.0  # of a step's result while all workers answer: they may compute


def check_ray(config: SageConfig) -> None:
    """Raises ConfigError: Ray is not installed, or no cluster answers at the address."""
    if config.distributed_executor_backend != "ray":
        if config.ray_address is not None:
            raise ConfigError(f"ray_address {config.ray_address} needs distributed_executor_backend ray.")
        return
    if config.tensor_parallel == 1:
        raise ConfigError("distributed_executor_backend ray is for tensor_parallel above 1; give both, or neither.")
    if config.ray_address is None:
        raise ConfigError("distributed_executor_backend ray needs ray_address: host:port of the cluster's head, or auto.")
    check_ray_address(config.ray_address, "distributed_executor_backend ray")


def set_ray(config: SageConfig) -> None:
    """Say in the environment, which engine processes inherit, which cluster Ray joins. Raises ConfigError: as `check_ray`."""
    check_ray(config)
    if config.distributed_executor_backend == "ray":
        os.environ["RAY_ADDRESS"] = config.ray_address


def wait_for_nodes(bundles: Sequence[dict[str, float]]) -> None:
    """Wait until the cluster has the workers' resource often enough.

    Args:
        bundles: resources of each worker.

    Raises:
        EngineError: it still has too little of it after `NODES_WAIT_S`.
    """
    import ray
    from lmdeploy.sage_device import RAY_RESOURCE

    wanted = sum(bundle.get(RAY_RESOURCE, 0) for bundle in bundles)
    end_s = time.monotonic() + NODES_WAIT_S
    while (found := ray.cluster_resources().get(RAY_RESOURCE, 0)) < wanted:
        if time.monotonic() > end_s:
            raise EngineError(
                f"the Ray cluster has {found:g} of the resource {RAY_RESOURCE}, and {wanted:g} workers need one each: start "
                f"nodes with `ray start --address HOST:PORT --resources '{{\"{RAY_RESOURCE}\": 1}}'`."
            )
        time.sleep(LOOK_S)


class RayWatch(Watch):
    """Watches the actors of LMDeploy's `RayExecutor`: asks each one every second whether it answers.

    A worker fails if Ray says that it is dead, if it has not answered for `LOST_S` seconds, or for `HANG_S` seconds while a
    step's result is late. Worker 0 fails if the result is `LATE_S` seconds late though all answer.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._asked: dict[int, tuple[Any, float]] = {}  # by worker: what it has not answered yet, and since when
        self._nodes: dict[int, str] = {}
        self._is_broken = False
        self.watch()

    def stop(self) -> None:
        """Stop the workers' loops, in place of LMDeploy's method, which raises if one is dead."""
        import ray

        if not self.failure:
            try:
                self.executor.collective_rpc("stop_async", timeout=END_S)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                self._is_broken = True
        if self.executor._prefetch_task is not None:
            self.executor._prefetch_task.cancel()

    def end(self) -> bool:
        """Stop watching. Returns True if a worker has failed, and Ray has been left already."""
        has_failed = self._is_broken or bool(self.failure)
        if has_failed and not self.failure:
            self._is_ending.wait(2 * LOOK_S)  # the watch finds out which one
        self._is_ending.set()
        if self._forget() and has_failed:
            self._leave()
        return has_failed

    def _run(self) -> None:
        import ray

        while not self._is_ending.wait(LOOK_S):
            for number, worker in enumerate(self.executor.workers):
                if number not in self._asked:
                    self._asked[number] = worker.get_node_ip.remote(), time.monotonic()
            ray.wait([ref for ref, _ in self._asked.values()], num_returns=len(self._asked), timeout=LOOK_S)
            for number, (ref, _) in list(self._asked.items()):
                if self._is_ending.is_set():
                    return
                try:
                    node = ray.get(ref, timeout=0)
                    del self._asked[number]
                except ray.exceptions.GetTimeoutError:
                    pass
                except ray.exceptions.RayError as error:
                    self._fail(self._name(number), f"has ended ({type(error).__name__})")
                    return
                else:
                    self._nodes[number] = node
            if self._loop is not None and (self._is_late() or self._is_deaf()):
                return

    def _is_late(self) -> bool:
        now = time.monotonic()
        with self._lock:
            late_s = self._late_s(now)
        silent = {number: now - since for number, (_, since) in self._asked.items()}
        number = max(silent, key=silent.__getitem__, default=0)
        silent_s = silent.get(number, 0.0)
        if silent_s > LOST_S or (late_s > HANG_S and silent_s > HANG_S):
            self._fail(self._name(number), f"has not answered for {silent_s:.0f} s")
        elif late_s > LATE_S:
            self._fail(self._name(0), hangs(late_s))
        return bool(self.failure)

    def _is_deaf(self) -> bool:
        task = self.executor._prefetch_task
        if task is None or not task.done() or task.cancelled():
            return False
        self._fail(self._name(0), f"is not heard any more: {task.exception()!r}")
        return True

    def _name(self, number: int) -> str:
        return f"{number} (node {self._nodes[number]})" if number in self._nodes else str(number)

    def _leave(self) -> None:
        import ray

        self._kill()
        with suppress(Exception):  # the cluster itself may be gone
            self.executor.ray_ctx.shutdown()
        ray.shutdown()

    def _kill(self) -> None:
        import ray

        for worker in self.executor.workers:
            with suppress(Exception):  # the cluster itself may be gone
                ray.kill(worker)
