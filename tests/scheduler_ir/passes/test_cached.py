"""What a cache gives is not computed."""

import pytest

from sagellm.scheduler_ir.nodes import NodeType
from sagellm.scheduler_ir.passes import PassSettings, check_same_work, drop_cached_recompute
from tests.scheduler_ir.made import node
from tests.scheduler_ir.passes.parts import collective, fetch, graph, ids, load, prefill, sample

ANY = PassSettings()


def cut(*nodes):
    before = graph(*nodes)
    after = drop_cached_recompute(before, ANY)
    check_same_work(before, after)
    assert drop_cached_recompute(after, ANY) is after
    return after


def test_a_prefill_begins_behind_what_is_cached():
    after = cut(fetch(1, 8), prefill(1, 0, 20, last=True), sample(1, 20))
    assert after["p1.0"].config == {"request": 1, "start": 8, "tokens": 12}
    assert after["p1.0"].inputs == ("kv:1:8",) and after["p1.0"].outputs == ("kv:1:20", "logits:1:20")


def test_tiers_continue_each_other():
    after = cut(prefill(1, 0, 20, inputs="also"), load(1, 8, 12), fetch(1, 8))
    assert after["p1.0"].config["start"] == 12 and after["p1.0"].inputs == ("kv:1:12", "also")
    assert ids(after) == ["p1.0", "l1.8", "f1"]


def test_chunks_that_are_cached_vanish():
    after = cut(fetch(1, 12), prefill(1, 0, 5), prefill(1, 5, 10), prefill(1, 10, 20, last=True), sample(1, 20))
    assert ids(after) == ["f1", "p1.10", "s1.20"]
    assert (after["p1.10"].config["start"], after["p1.10"].inputs) == (12, ("kv:1:12",))
    after = cut(fetch(1, 12), prefill(1, 0, 5), prefill(1, 5, 20))
    assert (after["p1.5"].config["start"], after["p1.5"].inputs) == (12, ("kv:1:12",))


def test_a_chunk_that_ends_where_the_cache_does_leaves_its_follower():
    after = cut(fetch(1, 8), prefill(1, 0, 5), prefill(1, 5, 7), prefill(1, 7, 20))
    assert ids(after) == ["f1", "p1.7"] and after["p1.7"].config == {"request": 1, "start": 8, "tokens": 12}


def test_the_last_token_is_computed_for_its_logits():
    whole = node("p", NodeType.PREFILL_CHUNK, "", "logits:1:20", request=1, start=0, tokens=20)
    after = cut(fetch(1, 20), whole, sample(1, 20))
    assert after["p"].config == {"request": 1, "start": 19, "tokens": 1} and after["p"].inputs == ("kv:1:20",)


@pytest.mark.parametrize(
    "nodes",
    [
        (fetch(2, 8), prefill(1, 0, 20)),
        (fetch(1, 8), prefill(1, 8, 20)),
        (fetch(1, 8, device="a"), prefill(1, 0, 20, device="b")),
        (load(1, 8, 12), prefill(1, 0, 20)),  # nobody gives the first 8
        (fetch(1, 8), load(1, 8, 12, inputs=""), prefill(1, 8, 20)),  # the load does not stand for the fetched ones
        (prefill(1, 0, 20), collective("c", "kv:1:20"), node("f", NodeType.PREFIX_FETCH, "c!", "kv:1:8", request=1, tokens=8)),
        (prefill(1, 0, 20),),
    ],
    ids=["another request", "behind already", "another device", "a gap", "not joined", "needed for it", "no cache"],
)
def test_what_stays(nodes: tuple):
    before = graph(*nodes)
    assert drop_cached_recompute(before, ANY) is before
