"""Routing decisions: each figure that matters turns one."""

import dataclasses
import logging

import pytest

from sagellm.core.errors import PolicyError
from sagellm.pd.base import EngineView, RouteDecision, RouteKind, RouteRequest, RoutingPolicy
from sagellm.pd.routing import NeverSplit, PDPolicy, Router, find_policy, policy_names
from sagellm.scheduler_ir.pd_costs import Link, PDCosts

PREFILL = EngineView("p", "prefill", token_bytes=12288)
DECODE = EngineView("d", "decode", token_bytes=12288, sources=frozenset({"p"}))
BUSY = dataclasses.replace(DECODE, num_running=4)
LONG = RouteRequest(2000)


def choose(*engines, request=LONG, policy=None):
    return (policy or PDPolicy()).choose(request, engines)


def test_a_long_prompt_beside_running_streams_is_split_and_not_on_an_idle_engine():
    assert choose(PREFILL, BUSY).kind is RouteKind.SPLIT
    found = choose(PREFILL, DECODE)
    assert found.kind is RouteKind.STAY and found.prefill_on is None
    assert "instead of p then d" in found.reason and "bytes moved" in found.reason


def test_a_slow_link_keeps_a_prompt_where_it_is_decoded():
    slow = PDCosts(link=Link(latency_s=0.1, bytes_per_s=1e6))
    assert choose(PREFILL, dataclasses.replace(BUSY, costs=slow)).kind is RouteKind.STAY


def test_a_prefill_engine_with_much_to_do_is_left_alone():
    assert choose(dataclasses.replace(PREFILL, waiting_tokens=100_000), BUSY).kind is RouteKind.STAY
    other = dataclasses.replace(PREFILL, engine_id="q")
    both = dataclasses.replace(BUSY, sources=frozenset({"p", "q"}))
    assert choose(dataclasses.replace(PREFILL, waiting_tokens=3000), other, both).prefill_on == "q"


@pytest.mark.parametrize("name", ["pd", "always-split"])
def test_a_prompt_that_would_come_too_late_is_not_split(name):
    """2,000 tokens take 2.3 s there; behind others, or over a slow link, longer than the decoding engine waits for them."""
    policy, patient = find_policy(name), dataclasses.replace(BUSY, timeout_s=3.0)
    assert choose(PREFILL, patient, policy=policy).kind is RouteKind.SPLIT
    busy = dataclasses.replace(PREFILL, waiting_tokens=700)
    slow = PDCosts(link=Link(latency_s=0.8, bytes_per_s=1e9))
    late = (
        (PREFILL, dataclasses.replace(BUSY, timeout_s=2.0)), (busy, patient),
        (PREFILL, dataclasses.replace(patient, costs=slow)),
    )  # fmt: skip
    for pair in late:
        found = choose(*pair, policy=policy)
        assert found.kind is RouteKind.STAY and "p would be too late" in found.reason
        assert f"d waits {pair[1].timeout_s:g} s" in found.reason and "instead" not in found.reason
    assert "0.75 s of work wait there" in choose(busy, patient, policy=policy).reason
    # Another prefill engine is in time.
    other = dataclasses.replace(PREFILL, engine_id="q", waiting_tokens=10)
    both = dataclasses.replace(patient, sources=frozenset({"p", "q"}))
    assert choose(dataclasses.replace(busy, cached_tokens=64), other, both, policy=policy).prefill_on == "q"


def test_a_cached_prefix_decides_where():
    other = dataclasses.replace(PREFILL, engine_id="q", cached_tokens=1024)
    both = dataclasses.replace(BUSY, sources=frozenset({"p", "q"}))
    assert choose(PREFILL, other, both).prefill_on == "q"
    # All of it on the engine that decodes: there is nothing to be computed or moved.
    assert choose(PREFILL, dataclasses.replace(BUSY, cached_tokens=1999)).kind is RouteKind.STAY
    # All of it on the prefill engine: it is loaded from there, even by an engine that has nothing else to do.
    found = choose(dataclasses.replace(PREFILL, cached_tokens=1984), DECODE)
    assert (found.kind, found.prefill_on) == (RouteKind.LOAD, "p")


def test_streams_are_spread_over_engines_that_decode():
    idle = dataclasses.replace(DECODE, engine_id="e")
    assert choose(BUSY, idle, policy=NeverSplit()).decode_on == "e"


def test_only_pairs_that_are_connected_are_split():
    alone = dataclasses.replace(BUSY, sources=frozenset())
    found = choose(PREFILL, alone)
    assert found.kind is RouteKind.STAY and "no prefill engine is connected" in found.reason
    assert choose(alone, dataclasses.replace(BUSY, sources=frozenset({"gone"}))).kind is RouteKind.STAY


def test_what_cannot_be_split_stays():
    for request in (RouteRequest(1), RouteRequest(2000, can_split=False)):
        assert choose(PREFILL, BUSY, request=request, policy=find_policy("always-split")).kind is RouteKind.STAY


def test_a_request_that_fits_nowhere_waits_where_it_decodes():
    full = dataclasses.replace(BUSY, free_blocks=2)
    found = choose(dataclasses.replace(PREFILL, free_blocks=2), full)
    assert found.decode_on == "d" and "no pool has room" in found.reason


def test_the_policies_by_name():
    assert policy_names()[:3] == ["pd", "always-split", "never-split"]
    assert find_policy("always-split").choose(RouteRequest(100), [PREFILL, DECODE]).kind is RouteKind.SPLIT
    assert find_policy("never_split").choose(LONG, [PREFILL, BUSY]).kind is RouteKind.STAY
    assert type(find_policy("tests.pd.test_routing:Lost")) is Lost
    for name, words in (("fastest", "known are: pd, always-split"), ("tests.pd.test_routing:Nothing", "has no Nothing")):
        with pytest.raises(PolicyError, match=words):
            find_policy(name)


class Lost(RoutingPolicy):
    """Sends everything to an engine that is not there."""

    name = "lost"

    def choose(self, request, engines):
        return RouteDecision(RouteKind.STAY, "nowhere", None, "why not")


class Raises(RoutingPolicy):
    name = "raises"

    def choose(self, request, engines):
        raise RuntimeError("a fault")


class Unconnected(RoutingPolicy):
    name = "unconnected"

    def choose(self, request, engines):
        return RouteDecision(RouteKind.SPLIT, "d", "q", "whatever")


class Says(RoutingPolicy):
    name = "says"

    def choose(self, request, engines):
        return "d"


@pytest.mark.parametrize("policy", [Lost(), Raises(), Unconnected(), Says()])
def test_a_policy_at_fault_is_switched_off_and_the_request_goes_on(policy, caplog):
    router = Router(policy)
    with caplog.at_level(logging.ERROR, "sagellm.pd"):
        for _ in range(2):
            assert router.choose(LONG, [PREFILL, BUSY]).kind is RouteKind.SPLIT
    assert router.num_faults == 1 and len(caplog.records) == 1 and policy.name in caplog.text
    assert ("Traceback" in caplog.text) == isinstance(policy, Raises)


def test_nobody_decodes():
    with pytest.raises(PolicyError, match="no engine decodes"):
        Router(PDPolicy()).choose(LONG, [PREFILL])
