"""Loads go early, beside compute that does not need them."""

from dataclasses import replace

from sagellm.scheduler_ir.passes import PassSettings, check_same_work, overlap_loads
from tests.scheduler_ir.passes.parts import decode, fetch, graph, ids, load, prefill

ANY = PassSettings()
SPEED = PassSettings(bytes_per_s={("cpu", "gpu"): 100.0})


def placed(before, settings=ANY):
    after = overlap_loads(before, settings)
    check_same_work(before, after)
    assert overlap_loads(after, settings) is after
    return after


def test_a_load_goes_to_the_front():
    after = placed(graph(decode(2, 5), decode(3, 5), fetch(1, 4), load(1, 4, 9), prefill(1, 9, 20)))
    assert ids(after) == ["f1", "l1.4", "d2.5", "d3.5", "p1.9"]
    assert after["l1.4"].config["beside"] == "d2.5"


def test_a_load_stays_behind_what_it_takes():
    after = placed(graph(decode(2, 5), decode(3, 5), load(1, 0, 9, inputs="kv:2:5"), prefill(1, 9, 20)))
    assert ids(after) == ["d2.5", "l1.0", "d3.5", "p1.9"]
    assert after["l1.0"].config["beside"] == "d3.5"


def test_a_load_that_the_next_step_waits_for_is_beside_nothing():
    before = graph(load(1, 0, 9), prefill(1, 9, 20), decode(2, 5))
    assert placed(before) is before
    stale = graph(replace(load(1, 0, 9), config={**load(1, 0, 9).config, "beside": "gone"}), prefill(1, 9, 20))
    assert "beside" not in placed(stale)["l1.0"].config


def test_compute_of_another_device_is_not_beside():
    after = placed(graph(decode(2, 5, device="b"), decode(3, 5), load(1, 0, 9), prefill(1, 9, 20)))
    assert after["l1.0"].config["beside"] == "d3.5"


def test_loads_of_one_link_wait_for_each_other():
    steps = [decode(8, 5, cost_s=0.5), decode(9, 5, cost_s=0.5)]
    loads = [load(name, 0, 9, bytes=60) for name in (1, 2, 3)]
    after = placed(graph(*steps, *loads, *[prefill(name, 9, 20, cost_s=1.0) for name in (1, 2, 3)]), SPEED)
    remarks = [(after[each.node_id].config["cost_s"], after[each.node_id].config.get("beside")) for each in loads]
    assert remarks == [(0.6, "d8.5"), (0.6, "d9.5"), (0.6, "p1.9")]


def test_without_loads_nothing_moves():
    before = graph(decode(2, 5), fetch(1, 4))
    assert overlap_loads(before, ANY) is before
