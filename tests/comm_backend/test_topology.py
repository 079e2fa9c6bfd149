"""Machines as trees of files: what is found, how far it is apart, what a transfer costs; and this machine."""

import json
import math
import os
from functools import partial

import pytest

from sagellm.comm_backend.topology import LinkKind, Seat, TopologyInfo, TopologyManager
from sagellm.comm_backend.topology.base import NumaNode, PciDevice
from sagellm.comm_backend.topology.draw import text_tree
from sagellm.comm_backend.topology.links import pci_path
from sagellm.comm_backend.topology.placement import place_engines, place_workers
from sagellm.core.errors import CommError, ConfigError
from tests.comm_backend.sysfs_tree import Tree, nvml, two_sockets
from tests.commands import run_sagellm

GPUS = ["0000:19:00.0", "0000:1d:00.0", "0000:21:00.0", "0000:81:00.0"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return TopologyManager(two_sockets(tmp_path_factory.mktemp("sys")).root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "sys")


def test_backends_are_proposed_by_where_workers_run(machine, tmp_path):
    def proposed(*seats):
        found = machine.candidates([Seat("a", *seat) for seat in seats])
        return " ".join(found.backends), found.reason

    assert proposed(((0, 1),), ((2,),)) == ("group shm", "workers share the memory of one host, on numa0")
    names, why = proposed(((0,),), ((16,),))
    assert names == "group shm" and "numa0, numa1, at most 2.1 times as far" in why
    far = machine.candidates([Seat("a"), Seat("b"), Seat("b")])
    assert far.backends == ("group",) and "2 hosts" in far.reason
    assert "gpu0 and gpu1 are joined by PXB" in proposed(((), 0), ((), 1))[1]
    names, why = proposed(((), 0), ((), 1), ((), 3))
    assert names == "group" and "gpu0 and gpu3 are joined by SYS" in why
    assert "the links of gpu9 are unknown" in proposed(((), 0), ((), 9))[1]
    linked = TopologyManager(two_sockets(tmp_path / "sys").root, nvml(GPUS, {0: [GPUS[1]] * 4, 1: [GPUS[0]] * 4}))
    assert "joined by NV4" in linked.candidates([Seat("a", (), 0), Seat("a", (), 1)]).reason
    empty = TopologyManager(info=TopologyInfo()).candidates([Seat("a", (0,)), Seat("a", (1,))])
    assert empty.backends == ("group", "shm") and "unknown NUMA node" in empty.reason


run = partial(run_sagellm, "topology")


def test_devices_of_two_sockets(machine):
    info = machine.detect()
    assert info.device_names == ("numa0", "numa1", "gpu0", "gpu1", "gpu2", "gpu3", "eth0", "ib0", "nvme0", "net")
    zero, one = info.numa_nodes
    assert zero.cpus == (*range(16), *range(32, 48)) and zero.memory_bytes == 1 << 30 and zero.l3_bytes == 32 << 20
    assert (zero.socket, one.socket) == (0, 1) and one.distances == {0: 21, 1: 10}
    assert [gpu.address for gpu in info.gpus] == GPUS and [gpu.numa_node for gpu in info.gpus] == [0, 0, 0, 1]
    nics = {nic.name: nic for nic in info.nics}
    assert nics["ib0"].hca == "mlx5_0" and nics["ib0"].kind == "infiniband" and nics["ib0"].bits_per_s == 200e9
    assert nics["eth0"].bits_per_s == 100e9 and nics["eth0"].is_up and nics["eth0"].numa_node == 1
    assert nics["lo"].kind == "loopback" and nics["lo"].address is None
    assert nics["ib0v0"].hca == "mlx5_1" and "ib0v0" not in info.device_names  # its card is there itself
    (function,) = [device for device in info.pci if device.physical_function]
    speeds = {device.address: (device.link_gts, device.link_width) for device in info.pci}
    assert speeds["0000:1a:00.0"] == (16.0, 16) and speeds["0000:21:00.0"] == (8.0, 16)  # that of the slower end
    assert (function.address, function.physical_function) == ("0000:1a:00.2", "0000:1a:00.0")
    assert info.notes == ("there are NVIDIA GPUs, and no pynvml to ask for their NVLinks: pip install nvidia-ml-py",)


@pytest.mark.parametrize(
    ("a", "b", "text", "gigabytes"),
    [
        ("gpu0", "ib0", "PIX", 24.0),  # the link of the card is faster than the port above it
        ("gpu0", "gpu1", "PXB", 12.0),  # x8
        ("gpu0", "gpu2", "NODE", 12.0),  # the port above is of 8 GT/s
        ("gpu3", "nvme0", "PHB", 6.0),  # x4
        ("gpu0", "gpu3", "SYS", 10.0),  # between sockets
        ("gpu0", "numa0", "PHB", 24.0),
        ("gpu0", "numa1", "SYS", 10.0),
        ("numa0", "numa1", "SYS", 10.0),
        ("gpu0", "gpu0", "X", 5000.0),
        ("numa1", "numa1", "X", 10.0),
        ("eth0", "net", "NET", 12.5),
    ],
)
def test_how_far_apart(machine, a, b, text, gigabytes):
    link, back = machine.link(a, b), machine.link(b, a)
    assert link.text == back.text == text and link.bytes_per_s == back.bytes_per_s == pytest.approx(1e9 * gigabytes)
    assert link.latency_s == back.latency_s


def test_by_the_bridges_between():
    def device(address, *bridges):
        return PciDevice(address=address, kind="gpu", path=("pci0000:00", *bridges, address))

    port = ("0000:00:01.0",)
    first = device("0000:02:00.0", *port, "a")
    assert pci_path(first, device("0000:03:00.0", *port, "b")) == pci_path(first, device("0000:03:00.0", *port)) == "PIX"
    assert pci_path(first, device("0000:03:00.0", *port, "b", "c")) == "PXB"  # a bridge below the switch
    assert pci_path(first, device("0000:03:00.0", "0000:00:02.0", "b")) == "PHB"
    assert pci_path(device("0000:02:00.0"), device("0000:02:00.1")) == "PIX"  # functions of one card
    assert pci_path(first, device("0000:03:00.0").model_copy(update={"path": ("pci0000:80", "0000:03:00.0")})) is None


@pytest.mark.parametrize("text", ["7-3", "-7", "0-70000", "0,x", "1-2-3"])
def test_a_list_of_cpus_that_is_none(tree, text):
    tree.node(0, "", "10")
    tree.write("devices/system/node/node0", {"cpulist": text})
    info = TopologyManager(tree.root).detect()
    assert info.numa_nodes[0].cpus == () and info.notes[0].endswith(f"cpulist holds {text!r}, which makes no sense")


def test_each_device_takes_the_cheapest_nic(machine):
    to_net = {name: machine.link(name, "net").source for name in ("gpu0", "gpu3", "numa1")}
    assert {name: source.split(",")[0] for name, source in to_net.items()} == {"gpu0": "ib0", "gpu3": "eth0", "numa1": "eth0"}
    assert machine.link("gpu0", "net").bytes_per_s == 24e9  # the NIC could do 25


def test_cost_matrix(machine):
    names, matrix = machine.info.device_names, machine.cost_matrix(1 << 20)
    cost = {(a, b): matrix[row][column] for row, a in enumerate(names) for column, b in enumerate(names)}
    assert cost["gpu0", "ib0"] == pytest.approx(5.7e-6 + (1 << 20) / 24e9)
    assert all(cost[a, b] == cost[b, a] > 0 for a, b in cost)
    near = [machine.link("gpu0", other).latency_s for other in ("ib0", "gpu1", "numa0", "gpu2", "gpu3")]
    assert near == sorted(set(near))  # PIX, PXB, PHB, NODE, SYS
    assert machine.link("numa0", "numa1").latency_s == pytest.approx(2.1e-6)
    assert machine.cost_matrix(0)[2][2] == 0
    with pytest.raises(CommError, match="0 or more"):
        machine.cost_matrix(-1)
    with pytest.raises(CommError, match="no device 'gpu9'"):
        machine.link("gpu0", "gpu9")


def test_nvlinks_between_gpus_and_by_a_switch(machine, tmp_path):
    root = two_sockets(tmp_path / "sys").root
    # NVML's order is not that of addresses; a link of gpu0 is down, and the binding knows no types of remote devices.
    order = [GPUS[3], GPUS[0], GPUS[1], GPUS[2]]
    direct = nvml(order, {0: [GPUS[0]] * 3 + [""], 1: [GPUS[3]] * 3}, version=3)
    del direct.nvmlDeviceGetNvLinkRemoteDeviceType
    manager = TopologyManager(root, direct)
    assert [gpu.address for gpu in manager.info.gpus] == order and manager.info.gpus[0].memory_bytes == 80 << 30
    assert [(links.peer, links.count) for links in manager.info.gpus[0].nvlinks] == [(GPUS[0], 3)]
    link = manager.link("gpu0", "gpu1")
    assert (link.kind, link.text, link.bytes_per_s) == (LinkKind.NVLINK, "NV3", 60e9)
    assert manager.link("gpu0", "gpu2").text == "SYS" and manager.link("gpu1", "gpu2").text == "PXB"
    switch = nvml(GPUS, {0: ["0000:c0:00.0"] * 18, 1: ["0000:c0:00.0"] * 18, 2: ["0000:c1:00.0"] * 12})
    manager = TopologyManager(root, switch)
    assert [link.peer for link in manager.info.gpus[0].nvlinks] == ["switch"]
    assert manager.link("gpu0", "gpu1").text == "NV18" and manager.link("gpu1", "gpu2").text == "NV12"
    assert manager.link("gpu0", "gpu1").bytes_per_s == pytest.approx(18 * 20.6e9)
    assert manager.link("gpu0", "gpu3").text == "SYS"
    assert "NV18" not in text_tree(manager.info) and "18 NVLinks" in text_tree(manager.info)
    assert TopologyInfo.from_json(manager.info.to_json()) == manager.info
    assert manager.detect_nvlink() == manager.info.gpus and machine.detect_nvlink()[0].nvlinks == ()


def test_an_nvml_that_fails_is_a_note(tmp_path):
    root = two_sockets(tmp_path / "sys").root
    broken = nvml(GPUS, {})
    broken.nvmlInit = lambda: 1 / 0
    info = TopologyManager(root, broken).detect()
    assert len(info.gpus) == 4 and any("NVML: division by zero" in note for note in info.notes)
    lost = nvml([*GPUS[:2], "nonsense"], {})
    info = TopologyManager(root, lost).detect()
    assert [gpu.address for gpu in info.gpus] == GPUS and any("GPUs from 2 on" in note for note in info.notes)


def test_a_container_without_rdma_and_with_a_virtual_function_alone(tree):
    tree.node(0, "0-1", "10")
    card = tree.pci("pci0000:00/0000:00:01.0", "nic")
    function = tree.pci("pci0000:00/0000:00:01.2", "nic", node=-1)
    (function / "physfn").symlink_to(f"../{card.name}")
    tree.nic("eth0", function, speed=4294967295)
    tree.nic("net", None)
    info = TopologyManager(tree.root).detect()
    assert info.device_names == ("numa0", "eth0", "net") and info.nics[0].bits_per_s is None
    assert [nic.name for nic in info.nics] == ["eth0", "nic:net"] and info.notes == ()
    assert TopologyManager(tree.root).link("eth0", "numa0").text == "PHB"


def test_sub_nodes_of_a_socket_memory_alone_and_missing_nodes(tree):
    tree.node(0, "0-3", "10 11 20 30", socket=0)
    tree.node(1, "4-7", "11 10 20 30", socket=0)
    tree.node(4, "8-11", "20 20 10 30", socket=1)
    tree.node(6, "", "30 30 30 10")
    manager = TopologyManager(tree.root)
    assert [node.index for node in manager.detect_numa()] == [0, 1, 4, 6]
    assert manager.detect_numa()[2].distances == {0: 20, 1: 20, 4: 10, 6: 30}
    texts = [manager.link("numa0", f"numa{other}").text for other in (1, 4, 6)]
    assert texts == ["NODE", "SYS", "SYS"] and not manager.info.notes


def test_no_numa_no_pci(tree):
    tree.write("devices/system/cpu", {"online": "0-3"})
    info = TopologyManager(tree.root).detect()
    assert info.device_names == ("numa0",) and info.numa_nodes[0].cpus == (0, 1, 2, 3) and info.notes
    (tree.root / "devices/system/cpu/online").unlink()
    manager = TopologyManager(tree.root)
    assert manager.info.device_names == () and manager.cost_matrix(1) == () and manager.info.notes
    with pytest.raises(CommError, match=r"cannot read .*nowhere as sysfs"):
        TopologyManager(tree.root / "nowhere").detect()


def test_any_file_may_hold_nonsense(tmp_path):
    root = two_sockets(tmp_path / "sys").root
    files = {path.name: path for path in sorted(root.rglob("*")) if path.is_file()}  # one of each kind
    assert len(files) > 15
    plain = TopologyManager(root).detect()
    num_notes = num_changed = 0
    for path in files.values():
        kept = path.read_bytes()
        for value in (b"\xff\x00{}", b"-7", b"9" * 30):
            path.write_bytes(value)
            manager = TopologyManager(root)
            info = manager.detect()
            num_notes += len(info.notes) > len(plain.notes)
            num_changed += info != plain
            assert TopologyInfo.from_json(info.to_json()) == info
            assert all(0 <= seconds < math.inf for row in manager.cost_matrix(1 << 20) for seconds in row), path
        path.write_bytes(kept)
    assert num_notes > 25 and num_changed > 28


def test_links_to_nowhere_and_folders_in_place_of_files(tree):
    tree.node(0, "0", "10")
    for name, target in (("0000:00:01.0", "../../../nowhere"), ("0000:00:02.0", "0000:00:02.0")):
        (tree.root / "bus/pci/devices" / name).symlink_to(target)
    outside = tree.root.parent / "outside"
    outside.mkdir()
    (outside / "class").write_text("0x030200")
    (tree.root / "bus/pci/devices/0000:00:03.0").symlink_to(outside)
    (tree.root / "devices/system/node/node0/cpulist").unlink()
    (tree.root / "devices/system/node/node0/cpulist").mkdir()
    manager = TopologyManager(tree.root)
    assert [gpu.address for gpu in manager.info.gpus] == ["0000:00:03.0"] and manager.link("gpu0", "numa0").text == "PHB"
    notes = " ".join(manager.info.notes)
    for part in ("0000:00:02.0/class: Too many levels", "no path from a host bridge", "Is a directory"):
        assert part in notes


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "Expecting value"),
        ("[1]", "document"),
        ('{"gpus": 3}', "gpus"),
        ('{"more": 1}', "more"),
        ('{"numa_nodes": [{"index": -1}]}', "numa_nodes.0.index"),
        ('{"nics": [{"name": "a", "kind": "ethernet", "bits_per_s": NaN}]}', "nics.0.bits_per_s"),
        ('{"numa_nodes": [{"index": 1}, {"index": 1}]}', "two devices are named 'numa1'"),
        ('{"pci": [{"address": "0000:00:01.0", "kind": "gpu", "path": []}]}', "pci.0.path"),
        ("[" * 100_000, "no topology"),
    ],
)
def test_json_that_is_no_topology(text, what):
    with pytest.raises(CommError, match="no topology") as error:
        TopologyInfo.from_json(text)
    assert what in str(error.value)


def test_this_machine_and_what_is_measured_here():
    manager = TopologyManager()
    found = manager.detect()
    assert found.numa_nodes and {0} <= {cpu for node in found.numa_nodes for cpu in node.cpus}
    assert set(manager.detect_nics()) == set(found.nics) and manager.detect_pci() == found.pci
    cpus = sorted(os.sched_getaffinity(0))
    nodes = (
        NumaNode(index=0, cpus=cpus[:1], distances={0: 10, 1: 20}, socket=0),
        NumaNode(index=1, cpus=cpus[-1:], distances={0: 20, 1: 10}, socket=1),
        NumaNode(index=2, distances={2: 10}),
    )
    manager = TopologyManager(info=TopologyInfo(host=found.host, numa_nodes=nodes))
    assert manager.link("numa0", "numa1").source == "default"
    info = manager.measure(1 << 20)
    pairs = {(each.a, each.b): each for each in info.measurements}
    assert set(pairs) == {(a, b) for a in ("numa0", "numa1") for b in ("numa0", "numa1")} | {("lo", "lo")}
    assert pairs["lo", "lo"].latency_s and all(1e6 < each.bytes_per_s < 1e13 for each in pairs.values())
    link = manager.link("numa0", "numa1")
    assert link.source == "measured" and link.bytes_per_s == min(
        pairs["numa0", "numa1"].bytes_per_s, pairs["numa1", "numa0"].bytes_per_s
    )
    assert manager.link("numa0", "numa2").source == "default" and any("numa2" in note for note in info.notes)
    assert os.sched_getaffinity(0) == set(cpus)  # of this thread
    assert TopologyInfo.from_json(info.to_json()) == info
    with pytest.raises(CommError, match="num_bytes"):
        manager.measure(1)


def test_another_machine_is_not_measured(machine):
    with pytest.raises(CommError, match="not that of this machine"):
        machine.measure(4096)
    with pytest.raises(CommError, match="not that of this machine"):
        TopologyManager(info=TopologyInfo(host="another host")).measure(4096)


def test_the_command_prints_draws_and_reads_again(machine, tmp_path):
    picture = tmp_path / "machine.svg"
    done = run("--sysfs", machine._root, "--draw", picture, "--num-bytes", 4096)
    assert done.exit_code == 0 and picture.read_text().count("<path") > 20
    lines = done.output.splitlines()
    assert "   │     ├─ 0000:19:00.0  gpu0, NVIDIA 2330, PCIe 16 GT/s x16" in "\n".join(lines).replace("│  │", "   │")
    row = next(line.split() for line in lines if line.startswith("gpu0 ") and "PXB" in line)
    assert row == ["gpu0", "PHB", "SYS", "X", "PXB", "NODE", "SYS", "SYS", "PIX", "SYS", "NET"]
    assert "Microseconds for 4096 bytes:" in lines and any(line.startswith("note: there are NVIDIA GPUs") for line in lines)
    document = json.loads((done := run("--sysfs", machine._root, "--json")).output)
    assert done.exit_code == 0 and document["seconds"] == [list(row) for row in machine.cost_matrix(1 << 20)]
    saved = tmp_path / "machine.json"
    saved.write_text(done.output)
    assert json.loads(run("--from", saved, "--json").output) == document
    assert TopologyInfo.read(saved) == machine.info


def test_the_command_says_no_and_why(tmp_path):
    for arguments in (["--draw", tmp_path / "machine.txt"], ["--from", tmp_path / "none.json"], ["--sysfs", tmp_path / "none"]):
        done = run(*arguments)
        assert done.exit_code == 1 and "error: cannot" in done.output, arguments
    assert "not that of this machine" in json.loads(run("--sysfs", tmp_path, "--measure", "--json").output)["error"]
    assert run("--num-bytes", -1).exit_code == 2


def cores_of(places):
    return [(place.nodes, list(place.cores)) for place in places]


def test_engines_get_cores_of_their_own_on_one_node_each():
    one, two = TopologyInfo(), TopologyInfo(numa_nodes=(NumaNode(index=0, cpus=(0, 1, 2)), NumaNode(index=2, cpus=(3, 4, 5))))
    assert cores_of(place_engines(one, range(5), 2)) == [((0,), [0, 1, 2]), ((0,), [3, 4])]
    assert cores_of(place_engines(one, [3, 7], 2)) == [((0,), [3]), ((0,), [7])]
    assert cores_of(place_engines(two, range(6), 2)) == [((0,), [0, 1, 2]), ((2,), [3, 4, 5])]
    assert cores_of(place_engines(two, range(1, 6), 3)) == [((0,), [1, 2]), ((2,), [3, 4]), ((2,), [5])]
    assert cores_of(place_engines(two, range(6), 1)) == [((0, 2), [0, 1, 2, 3, 4, 5])]
    with pytest.raises(ConfigError, match="3 engines for 2 cores"):
        place_engines(one, [0, 1], 3)


def test_workers_get_whole_nodes_and_neighbours_share(machine):
    sockets = [sorted({*range(16), *range(32, 48)}), sorted({*range(16, 32), *range(48, 64)})]
    assert cores_of(place_workers(machine.info, range(64), 2)) == [((0,), sockets[0]), ((1,), sockets[1])]
    assert [place.nodes for place in place_workers(machine.info, range(64), 4)] == [(0,), (0,), (1,), (1,)]
    assert cores_of(place_workers(machine.info, [0, 1], 2)) == [((0,), [0, 1])] * 2
