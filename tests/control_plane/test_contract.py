"""The contracts hold for our routers and kinds, and see what is broken."""

import itertools
import random
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from sagellm.cli.main import main
from sagellm.control_plane.base import Candidates, EngineView, RouteChoice, Router, RouteRequest
from sagellm.control_plane.contract import ENGINE_SUITE, ROUTER_SUITE
from sagellm.control_plane.kinds.openai import OpenAIEndpoint
from sagellm.control_plane.registry import ROUTERS, make_router
from sagellm.core.errors import PolicyError
from sagellm.replay.generate import generate
from tests.control_plane.endpoint import Endpoint, Paced


def broken(report):
    return {result.rule for result in report.results if not result.passed}


@pytest.mark.parametrize("name", ROUTERS.names())
def test_our_routers(name):
    assert ROUTER_SUITE.check(ROUTERS.find(name)).passed


class Raises(Router):
    name = "raises"

    def choose(self, request, engines):
        return RouteChoice(engines[1].engine_id, "the second")


class Elsewhere(Router):
    name = "elsewhere"

    def choose(self, request, engines):
        return RouteChoice("z", "it is best")


@pytest.mark.parametrize(("kind", "rule"), [(Raises, "raises_nothing"), (Elsewhere, "answers")])
def test_faults_of_routers_are_seen(kind, rule):
    assert rule in broken(ROUTER_SUITE.check(kind, rounds=1))


def test_a_process_keeps_to_the_contract_of_engine_kinds():
    report = ENGINE_SUITE.check(Paced)
    assert broken(report) == {"errors"}, "the paced endpoint answers without a prompt"


class Wrong(Paced):
    def __init__(self):
        super().__init__()
        self.model = "another"

    def command(self, port):
        return [*super().command(port)[:-4], "--model", "one"]


class Ends(Paced):
    async def ended(self):
        return "always"


@pytest.mark.parametrize(("kind", "rules"), [(Wrong, {"serves"}), (Ends, {"lives"})])
def test_faults_of_engine_kinds_are_seen(kind, rules):
    assert rules <= broken(ENGINE_SUITE.check(kind))


class Stays(OpenAIEndpoint):
    """Calls a server of others its own."""

    is_ours = True


def test_an_engine_that_does_not_stop_is_seen():
    with Endpoint() as engine:
        report = ENGINE_SUITE.check(lambda: Stays(engine.url))
    (stops,) = [result for result in report.results if result.rule == "stops"]
    assert "answers after `stop`" in stops.message


def test_the_commands_know_both_kinds():
    run = CliRunner().invoke
    assert "least-load" in run(main, ["list", "router", "--json"]).output
    assert "vllm" in run(main, ["list", "engine-kind", "--json"]).output
    assert run(main, ["check", "router", "prefix", "--rounds", "1"]).exit_code == 0
    needs_url = run(main, ["check", "engine-kind", "openai"])
    assert needs_url.exit_code == 2 and "url" in needs_url.output


def test_an_endpoint_by_its_url_keeps_to_the_contract():
    with Endpoint() as engine:
        report = ENGINE_SUITE.check(lambda: OpenAIEndpoint(engine.url))
        assert broken(report) <= {"errors", "streams"}  # the chats of this endpoint are no chats


def views(**loads):
    return [EngineView(name, "hybrid", num_running=load) for name, load in loads.items()]


def test_least_load_takes_the_engine_with_the_fewest_requests():
    request = RouteRequest(5)
    assert make_router("least-load").choose(request, views(a=3, b=1, c=2)).engine == "b"
    busy = [EngineView("a", "hybrid", num_waiting=4), EngineView("b", "hybrid", num_running=1)]
    assert make_router("least-load").choose(request, busy).engine == "b"
    full = [EngineView("a", "hybrid", kv_use=0.9), EngineView("b", "hybrid", kv_use=0.2)]
    assert make_router("least-load").choose(request, full).engine == "b"


def test_round_robin_takes_turns():
    router = make_router("round-robin")
    assert sorted(router.choose(RouteRequest(5), views(a=9, b=0, c=0)).engine for _ in range(6)) == list("aabbcc")


def test_order_prefers_devices_until_they_are_full():
    router = make_router("order", order=["ascend", "cuda"], queue=4)
    engines = [EngineView("c", "hybrid", device="cpu"), EngineView("g", "hybrid", device="cuda", num_running=3)]
    assert router.choose(RouteRequest(5), engines) == ("g", "preferred device", "cuda, 3 requests there")
    npu = EngineView("n", "hybrid", device="ascend", num_running=2)
    assert router.choose(RouteRequest(5), [*engines, npu]).engine == "n"
    full = EngineView("n", "hybrid", device="ascend", num_running=4)
    assert router.choose(RouteRequest(5), [*engines, full]).engine == "g"
    with pytest.raises(PolicyError, match="give a list of devices"):
        make_router("order", order="cuda")


def test_prefix_goes_where_the_prompt_began_up_to_a_bound_of_load():
    router = make_router("prefix", slack=2)
    talk = b"system prompt " * 40
    first = router.choose(RouteRequest(5, prompt=talk), views(a=0, b=1))
    assert first.engine == "a" and first.reason == "least load"
    again = router.choose(RouteRequest(5, prompt=talk + b"more"), views(a=2, b=0))
    assert again.engine == "a" and again.reason == "longest prefix sent" and "512 of 564 bytes" in again.detail
    busy = router.choose(RouteRequest(5, prompt=talk), views(a=3, b=0))
    assert busy.engine == "b" and "which has 3 requests" in busy.detail
    assert router.choose(RouteRequest(5, prompt=b"another " * 80), views(a=0, b=0)).reason == "least load"
    router.forget("a")
    router.forget("b")
    assert router.choose(RouteRequest(5, prompt=talk), views(a=0, b=0)).reason == "least load"


def test_prefix_forgets_the_oldest_prompts():
    router = make_router("prefix", capacity=8)
    for number in range(100):
        router.choose(RouteRequest(5, prompt=b"%4d" % number * 256), views(a=0))
    assert len(router._sent["a"]) == len(router._holders) == 8
    assert router.choose(RouteRequest(5, prompt=b"%4d" % 99 * 256), views(a=0)).reason == "longest prefix sent"
    assert router.choose(RouteRequest(5, prompt=b"%4d" % 3 * 256), views(a=0)).reason == "least load"


def test_prefix_forgets_the_end_of_a_prompt_first():
    router = make_router("prefix", capacity=6, min_share=0)
    long, other = bytes(range(256)) * 4, bytes(reversed(range(256))) * 4
    for prompt in (long, other):
        router.choose(RouteRequest(5, prompt=prompt), views(a=0))
    assert "512 of 1024 bytes" in router.choose(RouteRequest(5, prompt=long), views(a=0)).detail
    router.forget("a")
    assert not router._holders and not router._sent


def test_the_least_load_is_known_as_loads_change():
    """Against a look at all engines, with a thousand changes."""
    chance = random.Random(3)
    engines = {f"e{number}": SimpleNamespace(num=0, sent=0) for number in range(9)}

    def view(name):
        return EngineView(name, "hybrid", num_running=engines[name].num, num_sent=engines[name].sent)

    names = {name: name for name in engines}
    among = Candidates(names, view, lambda name: view(name).queue)
    assert [one.engine_id for one in among] == sorted(engines) and among.has("e3") and not among.has("e9")
    for _ in range(1000):
        name = chance.choice(sorted(engines))
        engines[name].num, engines[name].sent = chance.randint(0, 5), engines[name].sent + 1
        among.note(name)
        assert among.least() == min(map(view, engines), key=lambda one: one.queue)
    left = among.without({"e0", "e1"})
    assert left.names == [f"e{number}" for number in range(2, 9)]
    assert left.least() == min(map(view, left.names), key=lambda one: one.queue)




def hit_share(router, num_engines=4, capacity=1000, num_running=16):
    """Share of blocks of conversations that engines with small caches have where the router sends them."""
    trace = generate("conversation:requests=3000,seed=1")
    caches = {f"e{number}": OrderedDict() for number in range(num_engines)}
    running, sent = deque(maxlen=num_running), Counter()
    num_hits = 0
    for start, end in itertools.pairwise(trace.offsets.tolist()):
        keys = trace.keys[start:end]
        prompt = np.repeat(keys, 32).tobytes()  # 256 bytes for each block of 64 tokens
        loads = Counter(running)
        engines = [EngineView(one, "hybrid", num_running=loads[one], num_sent=sent[one]) for one in caches]
        name = router.choose(RouteRequest(len(prompt), prompt=prompt), engines).engine
        running.append(name)
        sent[name] += 1
        cache, is_cached = caches[name], True
        for key in keys.tolist():
            is_cached = is_cached and key in cache
            num_hits += is_cached
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits / len(trace.keys)


def test_prefix_finds_more_of_conversations_than_turns():
    assert hit_share(make_router("prefix")) >= 1.4 * hit_share(make_router("round-robin")) > 0
