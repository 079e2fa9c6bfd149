"""The observer of collectives on handles of a real gloo group, whichever way a caller sees their end."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import distributed as dist

from benchmarks.metrics.compute import parse_prometheus, series
from benchmarks.processes import wait_until
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.topology import Candidates
from sagellm.comm_backend.torch_groups import NcclBackend
from sagellm.core.collectives import GROUP
from sagellm.core.config import HookConfig
from sagellm.core.hooks import CommDecision, Plugin
from sagellm.core.host import PluginHost
from sagellm.engines.lmdeploy.comm import CommObserver
from sagellm.engines.lmdeploy.comm_choice import CommChoice, Joined
from sagellm.engines.lmdeploy.comm_stats import LATENCY_BOUNDS_S, CommStats, bus_factor
from sagellm.serve.comm_metrics import comm_families
from tests.sweeps import slow_but


class Group:
    """Both ranks of a gloo group. `start` begins a reduction of the first, which ends with `finish`."""

    def __init__(self, folder):
        store = dist.FileStore(str(folder / "store"), 2)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with ThreadPoolExecutor(2) as pool:
            self.ranks = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, options), range(2)))

    def start(self, tensor, async_op=False):
        return self.ranks[0].allreduce([tensor])

    def finish(self):
        self.ranks[1].allreduce([torch.ones(4)]).wait()


@pytest.fixture
def group(tmp_path):
    return Group(tmp_path)


@pytest.fixture
def observer(tmp_path):
    (tmp_path / "run").mkdir()
    config = HookConfig(plugins=({"name": f"{__name__}:Ends"},), comm_metrics=True, run_dir=tmp_path / "run")
    found = CommObserver(PluginHost(config), 0, 2)
    yield found
    found.close()


class Ends(Plugin):
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def comm_begin(self, op):
        return op.name

    def comm_end(self, op, token):
        self.heard.append((op.name, token))


def heard(observer):
    ((_, plugin),) = observer._host.plugins
    return plugin.heard


def poll(work):
    wait_until("the end", work.is_completed)


def poll_future(work):
    wait_until("the end", work.get_future().done)


WAYS = {
    "wait": lambda work: work.wait(),
    "poll": poll,
    "poll and wait": lambda work: (poll(work), work.wait()),
    "future": poll_future,  # as LMDeploy's `_broadcast_has_inputs` does
    "future and wait": lambda work: (poll_future(work), work.wait()),
    "wait twice": lambda work: (work.wait(), work.wait()),
}


@pytest.mark.parametrize("way", slow_but(WAYS, "future", "wait twice"))
def test_every_way_to_see_the_end_ends_the_observation_once(group, observer, way):
    tensor = torch.ones(4)
    work = observer.run("all_reduce", group.start, (tensor,), {"async_op": True})
    assert not work.is_completed() and heard(observer) == []
    other = threading.Thread(target=group.finish)
    other.start()
    WAYS[way](work)
    other.join()
    del work
    gc.collect()
    wait_until("the plug-in hears of it", lambda: heard(observer) != [])
    observer.close()
    assert heard(observer) == [("all_reduce", "all_reduce")] and tensor.tolist() == [2] * 4
    (row,) = observer.stats.report()
    assert (row["rank"], row["op"], row["count"], row["bytes"], row["bus_bytes"]) == (0, "all_reduce", 1, 16, 16)
    assert sum(row["latency_counts"]) == 1 and row["latency_ns"] >= 0 and row["exposed_ns"] >= 0


def test_a_handle_that_is_let_go_of_counts_without_a_time(group, observer):
    work = observer.run("all_reduce", group.start, (torch.ones(4),), {"async_op": True})
    group.finish()
    del work
    gc.collect()
    wait_until("the plug-in hears of it", lambda: heard(observer) != [])
    (row,) = observer.stats.report()
    assert (row["count"], row["bytes"], sum(row["latency_counts"])) == (1, 0, 0)


def test_only_waiting_is_exposed(group, observer):
    work = observer.run("all_reduce", group.start, (torch.ones(4),), {"async_op": True})
    time.sleep(0.6)  # the caller computes
    group.finish()
    work.wait()
    (row,) = observer.stats.report()
    assert row["latency_ns"] >= 6e8 > row["exposed_ns"]
    late = threading.Timer(1.0, group.finish)
    work = observer.run("all_reduce", group.start, (torch.ones(4),), {"async_op": True})
    late.start()
    work.wait()
    (row,) = observer.stats.report()
    assert row["exposed_ns"] >= 5e8


def test_a_collective_that_fails_ends_too(observer):
    def fails(tensor):
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="connection reset"):
        observer.run("all_reduce", fails, (torch.ones(4),), {})
    assert heard(observer) == [("all_reduce", "all_reduce")]


def test_what_is_no_handle_is_handed_on(observer):
    assert observer.run("recv", lambda tensor: 1, (torch.ones(4),), {}) == 1
    assert observer.stats.report()[0]["count"] == 1


@pytest.mark.parametrize(
    ("name", "values", "whole"),
    [
        ("all_reduce", (torch.ones(8),), 32),
        ("all_gather", ([torch.ones(8), torch.ones(8)], torch.ones(8)), 64),
        ("all_gather_into_tensor", (torch.ones(16), torch.ones(8)), 64),
        ("reduce_scatter", (torch.ones(8), [torch.ones(8), torch.ones(8)]), 64),
        ("reduce_scatter_tensor", (torch.ones(8), torch.ones(16)), 64),
        ("all_gather_object", ([None, None], {"a": 1}), 0),
    ],
)
def test_sizes_are_those_of_the_whole(observer, name, values, whole):
    observer.run(name, lambda *_: None, values, {})
    (row,) = observer.stats.report()
    assert row["bytes"] == whole and row["bus_bytes"] == whole * bus_factor(name, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather_into_tensor", 4, 0.75), ("reduce_scatter", 4, 0.75),
     ("all_to_all_single", 4, 0.75), ("broadcast", 8, 1.0), ("send", 8, 1.0)],
)  # fmt: skip
def test_factors_of_bus_bandwidth(name, ranks, factor):
    assert bus_factor(name, ranks) == factor


class Wanted(Plugin):
    """Wants the last backend for sums, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def comm_decide(self, request):
        self.asked.append((request.name, request.device, request.backends))
        return CommDecision(request.backends[-1]) if request.name == "all_reduce" else CommDecision(GROUP)


class StandIn:
    """Does what is asked of NCCL's process group here, on tensors of the device `meta`, and keeps it."""

    def __init__(self):
        self.calls = []

    def allreduce(self, tensors, options):
        self.calls.append("allreduce")
        return Ended()

    def barrier(self, options):
        return Ended()

    def abort(self):
        pass


class Ended:
    def is_completed(self):
        return True

    def exception(self):
        return None

    def synchronize(self):
        pass


class NcclOfMeta(NcclBackend):
    device_types = ("meta",)

    @classmethod
    def missing(cls):
        return ""

    def _make_group(self, store, timeout):
        return StandIn()


@pytest.fixture
def default_group():
    """The group in which rank 0 tells its decisions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_plugin_decides_about_tensors_of_another_device_where_a_backend_is_for_them(default_group, tmp_path):
    given = CommConfig(backend="nccl", rank=0, world_size=2, rendezvous=f"file://{tmp_path}/meet")
    host = PluginHost(HookConfig(plugins=({"name": f"{__name__}:Wanted"},)))
    choice = CommChoice(host, 0, 2, Joined(NcclOfMeta(given), Candidates((GROUP, "nccl"), "")))
    observer = CommObserver(host, 0, 2, choice)
    by_group = []

    def ask(name, *tensors):
        observer.run(name, lambda *_: by_group.append((name, tensors[-1].device.type)), tensors, {})

    there, here = torch.ones(4, device="meta"), torch.ones(4)
    for _ in range(2):
        ask("all_reduce", there)
    ask("all_reduce", here)  # NCCL cannot add these up
    ask("all_gather", [there, there], there)
    calls = choice.backend.torch_group.calls
    observer.close()
    assert calls == ["allreduce"] * 2
    assert by_group == [("all_reduce", "cpu"), ("all_gather", "meta")]
    ((_, plugin),) = host.plugins
    assert plugin.asked == [
        ("all_reduce", "meta", ("group", "nccl")), ("all_reduce", "cpu", ("group",)), ("all_gather", "meta", ("group", "nccl")),
    ]  # fmt: skip


def page(stats, step_s, choice=None):
    class Collector:
        def collect(self):
            return comm_families(stats.report(), step_s, choice)

    registry = CollectorRegistry()
    registry.register(Collector())
    return parse_prometheus(generate_latest(registry).decode())


def test_metrics_page():
    stats = CommStats()
    for latency_ns in (10_000, 10_001, 2_000_000_000):
        stats.add(1, "all_reduce", 1000, 4, latency_ns)
    stats.add(1, "all_reduce", 1000, 4, None)
    stats.expose(1, "all_reduce", 500_000_000)
    stats.expose(0, "broadcast", 400_000_000)
    choice = {
        "chosen": {"all_reduce": "shm"}, "candidates": ["group", "shm"], "reason": "one host", "topology_s": 0.004,
        "measured": {"all_reduce": {"shm": {"4096": 1e-5}}},
    }  # fmt: skip
    found, labels = page(stats, 2.0, choice), {"rank": "1", "op": "all_reduce"}
    told = {"op": "all_reduce", "backend": "shm"}
    assert found[series("sagellm_comm_backend", candidates="group shm", reason="one host", **told)] == 1
    assert found[series("sagellm_comm_measured_seconds", bytes="4096", **told)] == 1e-5
    assert found["sagellm_comm_topology_seconds"] == 0.004
    assert found[series("sagellm_comm_hidden_share", **labels)] == pytest.approx(1 - 0.5 / 2.000020001)
    assert found[series("sagellm_comm_operations_total", **labels)] == 4
    assert found[series("sagellm_comm_bytes_total", **labels)] == 3000
    assert found[series("sagellm_comm_seconds_total", **labels)] == 0.5
    assert found["sagellm_comm_share"] == 0.25
    buckets = [found[series("sagellm_comm_latency_seconds_bucket", le=str(bound), **labels)] for bound in LATENCY_BOUNDS_S]
    assert buckets[:2] == [1, 2] and buckets[-1] == 2, "a bound is inclusive"
    assert found[series("sagellm_comm_latency_seconds_bucket", le="+Inf", **labels)] == 3
    assert found[series("sagellm_comm_latency_seconds_count", **labels)] == 3
    latency_s = found[series("sagellm_comm_latency_seconds_sum", **labels)]
    assert latency_s == pytest.approx(2.000020001)
    name = "sagellm_comm_bandwidth_bytes_per_second"
    assert found[series(name, kind="algorithm", **labels)] == pytest.approx(3000 / latency_s)
    assert found[series(name, kind="bus", **labels)] == pytest.approx(4500 / latency_s)
    assert "sagellm_comm_share" not in page(CommStats(), 2.0)
