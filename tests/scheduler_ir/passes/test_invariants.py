"""The checker catches passes that change what is computed; the passes change nothing, whatever the graph."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode
from sagellm.scheduler_ir.passes import DEFAULT_PASSES, PassSettings, check_same_work
from tests.scheduler_ir.passes.parts import collective, decode, fetch, graph, load, prefill, sample

PLAN = graph(
    fetch(1, 8), load(1, 8, 12), prefill(1, 12, 20), prefill(1, 20, 30, last=True), sample(1, 30), decode(1, 31), sample(1, 31),
    decode(2, 5), sample(2, 5), collective("a", "x", 8), collective("b", "a!", 8),
)  # fmt: skip


def changed(name: str, **fields) -> Callable:
    def broken(before: IRGraph, settings: PassSettings) -> IRGraph:
        config = {**before[name].config, **fields.get("config", {})}
        return IRGraph(replace(each, **{**fields, "config": config}) if each.node_id == name else each for each in before)

    return broken


def without(*names: str) -> Callable:
    return lambda before, settings: IRGraph(each for each in before if each.node_id not in names)


def also(*nodes: IRNode) -> Callable:
    return lambda before, settings: IRGraph([*before, *nodes])


FAULTS = {
    "a cycle": (changed("a", inputs=("b!",)), "cycle, a -> b -> a"),
    "a sample is lost": (without("s2.5"), "token:2:5, which s2.5 gave, is given no longer"),
    "a chunk is lost": (without("p1.12"), "kv:1:20, which p1.12 gave, is given no longer"),
    "keys and values that are the result": (changed("d1.31", outputs=("logits:1:31",)), "kv:1:31, which d1.31 gave"),
    "an input from nowhere": (changed("s2.5", inputs=("logits:2:5", "fog")), "s2.5 takes fog, which no node gives"),
    "a token less": (changed("p1.12", config={"tokens": 7}), "token 19 of request 1 is neither computed nor fetched"),
    "a token more": (changed("p1.20", config={"tokens": 11}), "token 30 of request 1 is computed, which it was not"),
    "a token twice": (changed("p1.20", config={"start": 19, "tokens": 11}), "token 19 of request 1 is computed twice"),
    "a cached token": (changed("p1.12", config={"start": 11, "tokens": 9}), "token 11 of request 1 is computed, which"),
    "another request": (changed("p1.12", config={"request": 9}), "request"),
    "a decode step for another": (changed("d2.5", config={"requests": [3]}), "decode_step of request 2: 1 before, 0 after"),
    "a sample twice": (also(replace(sample(2, 5), node_id="z", outputs=())), "sample of request 2: 1 before, 2 after"),
    "a load of other bytes": (changed("l1.8", config={"bytes": 1}), "kv_load of request 1"),
    "a load from elsewhere": (changed("l1.8", config={"src_tier": "nvme"}), "kv_load of request 1"),
    "fewer bytes in a collective": (changed("a", config={"bytes": 4}), "bytes of all_reduce in tp: 16 before, 12 after"),
    "a sample of nothing": (changed("s1.30", inputs=()), "token:1:30 no longer rests on logits:1:30"),
    "a decode step without its token": (changed("d1.31", inputs=("kv:1:30",)), "logits:1:31 no longer rests on logits:1:30"),
    "a chunk without the one before": (changed("p1.20", inputs=()), "logits:1:30 no longer rests on token 0 of request 1"),
    "a chunk without the load": (changed("p1.12", inputs=("kv:1:8",)), "rests on token 8 of request 1"),
}


@pytest.mark.parametrize(("broken", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_pass_that_breaks_something_is_caught(broken: Callable, message: str):
    broken.__name__ = "broken"
    with pytest.raises(PlanError, match=re.escape(message)):
        PLAN.optimize([broken], check=True)


def test_who_did_it_is_named_and_nobody_without_the_check():
    broken = without("s2.5")
    broken.__name__ = "forgetful"
    with pytest.raises(PlanError, match="forgetful changed what is computed: token:2:5"):
        PLAN.optimize([*DEFAULT_PASSES, broken], check=True)
    assert len(PLAN.optimize([broken])) == len(PLAN) - 1


def test_a_new_graph_each_time():
    same = PLAN.optimize([])
    assert same == PLAN and same is not PLAN
    same.add(sample(7, 7))
    assert len(same) == len(PLAN) + 1


@st.composite
def plans(draw: st.DrawFn) -> IRGraph:
    """Prompts in chunks with caches that overlap them in places, decode steps, collectives, in any order."""
    nodes: list[IRNode] = []
    for name in range(draw(st.integers(0, 4))):
        device = draw(st.sampled_from(["", "a", "b"]))
        stops = sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=4)))
        taken = {*stops, *range(stops[-1], stops[-1] + 4)}  # ends that another node gives
        cached = draw(st.integers(0, 32))
        if cached and cached not in taken:
            nodes.append(fetch(name, cached, device=device))
            end = cached + draw(st.integers(0, 9))
            if end > cached and end not in taken:
                inputs = draw(st.sampled_from([None, "", "elsewhere"]))
                nodes.append(load(name, cached, end, inputs, bytes=draw(st.integers(0, 9)), device=device))
        for start, end in zip([0, *stops], stops):  # noqa: B905, the first one is one longer
            more = draw(st.sampled_from([{}, {"cost_s": 0.5}, {"token_budget": 4}]))
            nodes.append(prefill(name, start, end, last=end == stops[-1], device=device, **more))
        place = stops[-1]
        nodes.append(sample(name, place, device=device))
        for each in range(place + 1, place + 1 + draw(st.integers(0, 3))):
            nodes += [decode(name, each, device=device), sample(name, each, device=device)]
    for name in range(10, 10 + draw(st.integers(0, 4))):
        more = draw(st.sampled_from([{}, {"why": "x"}, {"phase": "engine"}, {"token_budget": 9}]))
        nodes += [decode(name, 5, **more), sample(name, 5)]
    values = ["outside", *[value for each in nodes for value in each.outputs]]
    for name in "uvw"[: draw(st.integers(0, 3))]:
        nodes.append(collective(name, draw(st.sampled_from(values)), bytes=draw(st.integers(0, 9))))
        values += nodes[-1].outputs
    return IRGraph(draw(st.permutations(nodes)) if draw(st.booleans()) else nodes)


SETTINGS = st.builds(PassSettings, token_budget=st.integers(0, 12), max_batch_size=st.integers(0, 3))


@given(plans(), SETTINGS)
def test_passes_change_nothing_that_is_computed(plan: IRGraph, settings: PassSettings):
    text = plan.to_json()
    best = plan.optimize(settings=settings, check=True)
    check_same_work(plan, best)
    assert plan.to_json() == text


@given(plans(), SETTINGS)
def test_passes_are_done_the_first_time(plan: IRGraph, settings: PassSettings):
    best = plan.optimize(settings=settings)
    assert best.optimize(settings=settings) == best


@given(plans(), SETTINGS, st.permutations(DEFAULT_PASSES))
def test_any_order_of_passes_leaves_the_work_as_it_is(plan: IRGraph, settings: PassSettings, passes: list):
    plan.optimize(passes, settings, check=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_budget": -1}, "token_budget is -1; give a whole number from 0 on"),
        ({"max_batch_size": True}, "max_batch_size is True"),
    ],
)
def test_settings_that_make_no_sense(given: dict, message: str):
    with pytest.raises(PlanError, match=message):
        PassSettings(**given)
