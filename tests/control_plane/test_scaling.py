"""Scaling: the policy, the loop and its replay by themselves, on the virtual clock, and in a manager with real engines."""

import concurrent.futures
import dataclasses
import json
import threading
from itertools import pairwise

import httpx
import pytest
from click.testing import CliRunner
from openai import OpenAI

from benchmarks.processes import wait_until
from sagellm.cli import main
from sagellm.control_plane.base import PoolView, ScalingDecision, ScalingPolicy
from sagellm.control_plane.config import ManagerConfig, ScalingConfig
from sagellm.control_plane.contract import SCALING_SUITE
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.registry import SCALERS, make_scaler
from sagellm.control_plane.scalers.fixed import Fixed
from sagellm.control_plane.scalers.sla import SLA, Capacity
from sagellm.control_plane.scaling import OPEN, STEP, ScalingLoop, open_fields
from sagellm.control_plane.scaling_replay import verify_scaling
from sagellm.control_plane.sla.elastic import ScaledPool, oscillations, simulate_scaling
from sagellm.control_plane.sla.load import Load, read_load
from sagellm.control_plane.sla.profile import SetupCosts
from sagellm.control_plane.sla.simulate import Fleet, simulate
from sagellm.core.config import read_model
from sagellm.core.errors import ConfigError, PolicyError, TraceError
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.replay.schedule.base import RecordedRequest
from tests.control_plane.test_contract import broken
from tests.control_plane.test_gateway import metric
from tests.control_plane.test_sla import TARGETS, made

PROFILE = made()
CONTENT = PROFILE.model_dump(mode="json")
COSTS = SetupCosts(PROFILE.points)
FLEET = Fleet(1, max_batch_size=16, kv_blocks=256)
LIMITS = {"max_prefill_tokens": 512}


class Asks(ScalingPolicy):
    """Asks for these numbers in turn."""

    name = "asks"

    def __init__(self, *targets):
        self.targets = list(targets)

    def decide(self, view):
        return ScalingDecision(self.targets.pop(0), "as it was told")


def config(**settings):
    return ScalingConfig(**{"max": 8, "cooldown_s": 0.0, "down_after": 1} | settings)


def steps(loop, *presents, each_s=10.0):
    return [loop.step(PoolView(each_s * number, each_s, 1.0, num_ready=one)) for number, one in enumerate(presents, 1)]


def test_bounds_and_pauses():
    within = steps(ScalingLoop(Asks(9, 0, 3), config(min=2, max=4)), 2, 4, 3)
    assert [(one.asked, one.target, one.action) for one in within] == [(9, 4, "up"), (0, 2, "down"), (3, 3, "keep")]
    assert "the bounds are 2 and 4" in within[0].reason and "bounds" not in within[2].reason
    cooling = steps(ScalingLoop(Asks(2, 3, 3, 3), config(cooldown_s=25.0)), 1, 2, 2, 2)
    assert [one.target for one in cooling] == [2, 2, 2, 3]
    assert cooling[1].reason == "as it was told; the last change was too short ago by 15.0 s"
    fewer = steps(ScalingLoop(Asks(1, 1, 4, 1, 2, 1), config(down_after=3)), 4, 4, 4, 4, 4, 4)
    assert [one.target for one in fewer] == [4, 4, 4, 4, 4, 2], "the most that three decisions in a row asked for"
    assert "2 of the last 3 decisions asked for fewer" in fewer[3].reason
    again = steps(ScalingLoop(Asks(5, 4, 4), config(cooldown_s=10.0, down_after=2)), 4, 5, 5)
    assert [one.target for one in again] == [5, 5, 4]


class Raises(ScalingPolicy):
    name = "raises"

    def decide(self, view):
        raise RuntimeError("planted")


class Half(ScalingPolicy):
    name = "half"

    def decide(self, view):
        return ScalingDecision(1.5, "a half")


class Forgets(ScalingPolicy):
    """Does not decide by its views alone."""

    name = "forgets"
    num = 0

    def decide(self, view):
        Forgets.num += 1
        return ScalingDecision(Forgets.num % 3, "in turn")


@pytest.mark.parametrize("policy", [Raises, Half])
def test_a_faulty_policy_is_replaced_by_the_present_number(policy):
    loop = ScalingLoop(policy(), config())
    found = steps(loop, 3, 3)
    assert [(one.policy, one.target) for one in found] == [("fixed", 3), ("fixed", 3)] and loop.num_faults == 1


def test_the_contract():
    assert SCALING_SUITE.check(Fixed).passed
    assert SCALING_SUITE.check(lambda **more: SLA(**{"profile": CONTENT} | more)).passed
    for policy, rule in ((Raises, "raises_nothing"), (Half, "answers"), (Forgets, "repeats")):
        assert rule in broken(SCALING_SUITE.check(policy, rounds=1))
    assert set(SCALERS.names()) == {"fixed", "sla"}
    assert CliRunner().invoke(main, ["check", "scaling", "fixed", "--rounds", "1"]).exit_code == 0


def seen(rate, **more):
    view = {"num_ended": int(10 * rate), "prompt_tokens": 200.0, "output_tokens": 20.0, "max_engines": 16} | more
    return PoolView(10.0, 10.0, rate, **view)


def test_the_policy_asks_for_what_the_rate_needs():
    asked = [SLA(CONTENT).decide(seen(rate, num_ready=n)).target for rate, n in ((1, 1), (8, 1), (16, 1), (32, 1))]
    assert asked[0] == 1 and asked == sorted(asked) and 1 < asked[1] < asked[3]
    assert SLA(CONTENT).decide(seen(8, num_ready=1, num_waiting=100)).target > asked[1]
    policy = SLA(CONTENT)
    assert policy.decide(PoolView(10.0, 10.0, 2.0, num_ready=3)) == (3, "no request has ended yet; 2.00 requests/s")
    # Between what is enough and what is too much the number stays.
    ends = {rate: [SLA(CONTENT).decide(seen(rate, num_ready=n)).target for n in (1, 16)] for rate in range(2, 40)}
    rate, both = next((rate, each) for rate, each in ends.items() if each[0] < each[1])
    assert [SLA(CONTENT).decide(seen(rate, num_ready=n)).target for n in both] == both
    assert all(fewest <= most for fewest, most in ends.values())
    assert SLA(CONTENT, ttft_ms=1.0).decide(seen(1, num_ready=2)).target == 16, "no number of engines meets the targets"


def test_the_prediction_is_near_the_virtual_engine():
    """At the rate that it gives to one engine most requests are in time, and at half as much more many are late."""
    capacity = Capacity(COSTS, 16)
    rate = max(rate / 4 for rate in range(1, 60) if capacity.engines(rate / 4, 200, 20, 0.5, 0.05, 2) == 1)
    shares = []
    for scale in (1.0, 1.5):
        load = read_load(str(rate * scale), num_requests=200, prompt_tokens=200, output_tokens=20)
        shares.append(simulate(load, FLEET, COSTS, TARGETS, **LIMITS).share)
    assert shares[0] > 0.85 > shares[1]


def test_the_correction_follows_the_observed_latency():
    capacity = Capacity(COSTS, 16)
    policy, slow = SLA(CONTENT), SLA(CONTENT)
    expected = capacity.itl_s(4.0, 2.0, 200, 20)
    for _ in range(60):
        for each, factor in ((policy, 1.0), (slow, 1.5)):
            itl_s = factor * capacity.itl_s(4.0 * factor, 4.0 * 20 * factor * expected, 200, 20)
            each.decide(seen(4.0, itl_s=itl_s, num_ready=1))
    assert policy._correction == pytest.approx(1.0, abs=0.1) and slow._correction == pytest.approx(1.5, abs=0.25)
    assert slow.decide(seen(16, num_ready=1)).target > policy.decide(seen(16, num_ready=1)).target


@pytest.mark.parametrize(("options", "says"), [
    ({"ttft_ms": 0}, "ttft_ms is 0; give a number above 0"), ({"use": 1.5}, "use is 1.5"), ({"lookahead": 4}, "it has tensor_"),
    ({"profile": {"points": 3}}, "profile is no profile"), ({"profile": "none.json"}, "cannot read the profile none.json"),
    ({"ttft": 1}, "cannot be built with options"),
])  # fmt: skip
def test_options_that_make_no_sense(options, says):
    with pytest.raises((PolicyError, ConfigError), match=says):
        make_scaler("sla", **{"profile": CONTENT} | options)
    with pytest.raises(PolicyError, match="give a whole number from 1 on"):
        make_scaler("fixed", engines=0)


def test_settings_that_make_no_sense():
    engines = {"a": {"kind": "openai", "url": "http://127.0.0.1:9"}, "b-2": {"kind": "sagellm"}, "b": {"kind": "sagellm"}}
    for scaling, says in (
        ({"c": {"max": 2}}, "scaling names 'c', which is no engine of this file; engines are a, b-2, b"),
        ({"b": {"max": 1, "min": 2}}, "min 2 is above max 1"), ({"b": {"max": 2, "most": 1}}, "scaling.b.most: unknown key"),
        ({"b": {}}, "scaling.b.max: "), ({"b": {"max": 2, "interval_s": 0}}, "scaling.b.interval_s: "),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            read_model(ManagerConfig, None, {"engines": engines, "scaling": scaling})
    fixed = {"policy": "fixed", "max": 2}
    for scaling, says in (
        ({"a": fixed}, "scaling.a: engines of the kind openai are not started by the manager"),
        ({"b": fixed | {"min": 2}}, "engine b-2: a pool gives this name"),
        ({"b": fixed | {"policy": "none"}}, "unknown scaling policy 'none'; known are: fixed, sla"),
    ):
        with pytest.raises((ConfigError, PolicyError), match=says):
            ControlPlaneManager(port=0, publish=False, engines=engines, scaling=scaling).start()


def pool(policy, settings, engines, start_s=8.0):
    return ScaledPool(ScalingLoop(policy, settings), settings, engines, start_s)


def doubling(rates=(4, 16, 4), each_s=80, seed=1):
    """Poisson arrivals of one rate after the other."""
    rows, begin_s = [], 0.0
    for number, rate in enumerate(rates):
        part = read_load(str(rate), num_requests=rate * each_s, prompt_tokens=200, output_tokens=20, seed=seed + number)
        rows += [begin_s + each.arrival_s for each in part.requests if each.arrival_s < each_s]
        begin_s += each_s
    return Load("doubling", tuple(RecordedRequest(number, at, 200, 20) for number, at in enumerate(rows)))


def test_a_fleet_that_keeps_its_size_runs_as_one_without_scaling():
    load = read_load("6", num_requests=100, prompt_tokens=200, output_tokens=20)
    link = {"link": Link(latency_s=0.01, bytes_per_s=1e9), "kv_bytes_per_token": 1000}
    one = simulate_scaling(load, FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(), config(), 1)}, **LIMITS)
    assert one.outcome.requests == simulate(load, FLEET, COSTS, TARGETS, **LIMITS).requests
    assert one.engines == pytest.approx(1.0) and len(one.steps["hybrid"]) > 0
    pools = {role: pool(Fixed(), config(), 1) for role in ("prefill", "decode")}
    split = simulate_scaling(load, FLEET, COSTS, TARGETS, pools, **LIMITS, **link)
    fleet = dataclasses.replace(FLEET, prefill=1)
    assert split.outcome.requests == simulate(load, fleet, COSTS, TARGETS, **LIMITS, **link).requests
    assert split.engines == pytest.approx(2.0) and split.steps["decode"][0][0].role == "decode"


@pytest.fixture(scope="module")
def elastic():
    settings = config(policy="sla", options={"profile": CONTENT}, cooldown_s=20.0, down_after=2)
    return settings, simulate_scaling(
        doubling(), FLEET, COSTS, TARGETS, {"hybrid": pool(SLA(CONTENT), settings, 1)}, **LIMITS
    )


def test_a_load_that_rises_and_falls_on_the_virtual_clock(elastic):
    settings, run = elastic
    changes = run.changes("hybrid")
    ups, downs = [each for each in changes if each[1] > 0], [each for each in changes if each[1] < 0]
    assert ups and downs and max(at for at, _ in ups) < min(at for at, _ in downs)
    assert not oscillations(changes, 2 * settings.cooldown_s) and oscillations([(0, 1), (30, -1), (90, 1)], 40) == 1
    assert all(later - at >= settings.cooldown_s for (at, _), (later, _) in pairwise(changes))
    assert len(run.outcome.requests) == len(doubling().requests) and all(each.num_tokens == 20 for each in run.outcome.requests)
    kept = simulate_scaling(doubling(), FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(), config(), 2)}, **LIMITS)
    assert 1 < run.engines < max(view.present for view, _ in run.steps["hybrid"]) and run.outcome.share > kept.outcome.share


def test_an_engine_takes_requests_from_its_start_to_its_drain():
    load, one = doubling(each_s=40), config(policy="fixed", options={"engines": 2})
    alone = simulate_scaling(load, FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(), config(), 1)}, **LIMITS)
    never = simulate_scaling(load, FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(2), one, 1, 1e6)}, **LIMITS)
    late = simulate_scaling(load, FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(2), one, 1, 25.0)}, **LIMITS)
    assert never.outcome.requests == alone.outcome.requests and late.outcome.share > alone.outcome.share
    assert [view.num_starting for view, _ in late.steps["hybrid"][:5]] == [0, 1, 1, 0, 0]
    fewer = simulate_scaling(load, FLEET, COSTS, TARGETS, {"hybrid": pool(Fixed(1), one, 2)}, **LIMITS)
    assert fewer.engine_s == pytest.approx(fewer.span_s + 10.0, abs=3.0), "one of two drains after the first interval"
    assert len(fewer.outcome.requests) == len(load.requests)


def test_pools_of_prefill_and_decode_engines_change_by_themselves():
    pools = {role: pool(SLA(CONTENT), config(down_after=2), 1) for role in ("prefill", "decode")}
    run = simulate_scaling(doubling(each_s=40), FLEET, COSTS, TARGETS, pools, **LIMITS)
    assert all(each.num_tokens == 20 for each in run.outcome.requests)
    assert run.changes("prefill") and {view.role for view, _ in run.steps["decode"]} == {"decode"}


def record_of(elastic, file, change=lambda lines: lines):
    settings, run = elastic
    lines = [{"event": "route"}, {"event": OPEN} | open_fields("a", settings, SLA(CONTENT))]
    lines += [{"event": STEP} | line for line in run.record("hybrid")]
    for line in lines[2:]:
        line["pool"] = "a"
    file.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return file


def test_a_record_is_replayed_exactly(elastic, tmp_path):
    file = record_of(elastic, tmp_path / "r.jsonl")
    found = verify_scaling(file)
    assert found.agrees and found.pools == {"a": len(elastic[1].steps["hybrid"])} and found.num_decisions > 20
    done = CliRunner().invoke(main, ["replay", "--scaling", str(file)])
    assert done.exit_code == 0 and f"{found.num_decisions} decisions of a; 0 differences, 0 gaps" in done.output

    def tamper(lines):
        assert lines[7]["target"]
        lines[7] |= {"target": lines[7]["target"] + 1, "reason": "another"}
        return lines

    done = CliRunner().invoke(main, ["replay", "--scaling", str(record_of(elastic, file, tamper)), "--json"])
    told = json.loads(done.output)
    places = [(each["line"], each["field"]) for each in told["differences"]]
    assert done.exit_code == 1 and places == [(8, "target"), (8, "reason")]
    missing = verify_scaling(record_of(elastic, file, lambda lines: lines[:9] + lines[10:]))
    assert missing.gaps == [(10, 8, 9)] and not missing.agrees


def test_a_record_that_cannot_be_replayed(elastic, tmp_path):
    file = tmp_path / "r.jsonl"
    with pytest.raises(TraceError, match="has no decision of a pool"):
        verify_scaling(record_of(elastic, file, lambda lines: lines[:2]))
    with pytest.raises(TraceError, match="pool 'a' decides before its line scale_open"):
        verify_scaling(record_of(elastic, file, lambda lines: lines[2:]))
    with pytest.raises(TraceError, match="no line of a pool"):
        verify_scaling(record_of(elastic, file, lambda lines: [*lines[:2], lines[2] | {"view": {}}]))
    done = CliRunner().invoke(main, ["replay", "--scaling", str(tmp_path / "none")])
    assert done.exit_code == 2 and "cannot read" in done.output
    done = CliRunner().invoke(main, ["replay", "--scaling", str(file), "--capacity", "3"])
    assert done.exit_code == 2 and "--capacity has no meaning with --scaling" in done.output


class Busy(ScalingPolicy):
    """A second engine from six requests on; back to one once it serves some of two to five."""

    name = "busy"

    def decide(self, view):
        is_back = view.num_ready == 2 and 2 <= view.num_running < 6
        target = 2 if view.num_running >= 6 else 1 if is_back else view.present
        return ScalingDecision(target, f"{view.num_running} are running")


class Two(ScalingPolicy):
    name = "two"

    def decide(self, view):
        return ScalingDecision(2, "always two")


HERE = "tests.control_plane.test_scaling"
ALL = {"ignore_eos": True}
LONG = 800  # tokens of the streams that must survive


@pytest.fixture(scope="module")
def manager(model_folder, tmp_path_factory):
    """One manager with three pools: engines of this project, a dry run, and a policy that raises."""
    engines = {
        "small": {"kind": "sagellm", "model": str(model_folder("llama")), "model_name": "tiny", "device": "cpu", "threads": 1,
                  "kv_blocks": 300, "block_size": 16, "max_batch_size": 16},
        **{name: {"kind": "tests.control_plane.endpoint:Paced", "model": name} for name in ("dry", "faulty")},
    }  # fmt: skip
    often = {"max": 2, "interval_s": 0.1, "cooldown_s": 0.3, "down_after": 1}
    scaling = {
        "small": often | {"policy": f"{HERE}:Busy"}, "dry": often | {"policy": f"{HERE}:Two", "dry_run": True},
        "faulty": often | {"policy": f"{HERE}:Raises"},
    }  # fmt: skip
    record = tmp_path_factory.mktemp("scaling") / "record.jsonl"
    settings = {"port": 0, "check_interval_s": 0.2, "record": record, "engines": engines, "scaling": scaling}
    with ControlPlaneManager(ManagerConfig(**settings), publish=False) as manager:
        yield manager


def names_of(manager, kind="sagellm"):
    return {one["name"]: one["state"] for one in manager.engines() if one["kind"] == kind}


def lines_of(manager, event, pool):
    lines = map(json.loads, manager.config.record.read_text().splitlines())
    return [line for line in lines if line["event"] == event and line.get("pool") == pool]


def test_a_pool_grows_under_load_and_shrinks_without_losing_a_stream(manager):
    assert names_of(manager) == {"small": "ready"}
    enough = threading.Event()
    client = OpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120)

    def chat(number):
        while not enough.is_set():
            said = [{"role": "user", "content": f"hello {number}"}]
            client.chat.completions.create(model="tiny", messages=said, max_tokens=50)

    def stream(number):
        """The reasons to finish, and the number of pieces."""
        pieces = client.completions.create(
            model="tiny", prompt=f"prompt {number}", max_tokens=LONG, temperature=0, stream=True, extra_body=ALL
        )
        reasons = [each.choices[0].finish_reason for each in pieces]
        return [each for each in reasons if each], len(reasons)

    with concurrent.futures.ThreadPoolExecutor(8) as threads, client:
        try:
            chats = [threads.submit(chat, number) for number in range(8)]
            wait_until("a second engine", lambda: "small-2" in names_of(manager))
        finally:
            enough.set()
        assert [each.result() for each in chats] == [None] * 8
        wait_until("its readiness", lambda: names_of(manager)["small-2"] == "ready", 120)
        streams = [each.result() for each in [threads.submit(stream, number) for number in range(4)]]
        assert [(reasons, num > 100) for reasons, num in streams] == [(["length"], True)] * 4
    routes = manager.status()["decisions"]
    assert [one["engine"] for one in routes if one["path"] == "/v1/completions"].count("small-2") >= 1
    wait_until("the end of the second engine", lambda: names_of(manager) == {"small": "ready"})
    down = [line for line in lines_of(manager, "scale", "small") if line["action"] == "down"]
    assert len(down) == 1 and down[0]["view"]["num_running"] >= 1, "streams were running when it was drained"
    assert [line["what"] for line in lines_of(manager, "scaled", "small")] == ["started", "stopped"]
    assert metric(manager, "sagellm_gateway_requests_total", engine="small-2", outcome="served") >= 1
    assert metric(manager, "sagellm_scaling_decisions_total", pool="small", action="up") == 1
    views = [line["view"] for line in lines_of(manager, "scale", "small")]
    assert sum(view["rate"] * view["interval_s"] for view in views) >= 12, "eight chats or more, and four streams"


def test_a_pool_of_two_grows_by_one(start_manager, tmp_path):
    engines = {"a": {"kind": "tests.control_plane.endpoint:Paced", "model": "m"}}
    scaling = {"a": {"policy": "fixed", "options": {"engines": 3}, "min": 2, "max": 3, "interval_s": 0.1}}
    manager = start_manager(engines=engines, scaling=scaling, record=tmp_path / "r.jsonl")
    wait_until("three engines", lambda: list(names_of(manager, "paced").values()) == ["ready"] * 3)
    wait_until("later decisions", lambda: lines_of(manager, "scale", "a")[-1]["view"]["num_ready"] == 3)
    assert list(names_of(manager, "paced")) == ["a", "a-2", "a-3"] and manager.engines()[0]["starts"] == 1
    assert [line["engine"] for line in lines_of(manager, "scaled", "a")] == ["a-3"]
    assert [line["action"] for line in lines_of(manager, "scale", "a") if line["action"] != "keep"] == ["up"]


def test_a_dry_run_only_says_what_it_would_do(manager):
    pool = wait_until("decisions", lambda: (found := manager.status()["scaling"]["dry"])["decisions"] and found)
    assert {(one["action"], one["target"]) for one in pool["decisions"]} <= {("up", 2), ("keep", 1)}
    assert any(line["action"] == "up" for line in lines_of(manager, "scale", "dry")) and pool["dry_run"]
    assert pool["engines"] == ["dry"] and set(names_of(manager, "paced")) == {"dry", "faulty"}


def test_a_pool_goes_on_without_its_faulty_policy(manager):
    wait_until("a fault", lambda: manager.status()["scaling"]["faulty"]["faults"])
    wait_until("decisions after it", lambda: len(lines_of(manager, "scale", "faulty")) > 2)
    assert {(line["policy"], line["target"]) for line in lines_of(manager, "scale", "faulty")} == {("fixed", 1)}
    assert metric(manager, "sagellm_scaling_faults_total", pool="faulty") == 1


def test_what_the_manager_measured_and_recorded(manager):
    """The record of all pools is replayed, whatever was asked before."""
    client = OpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120)
    with client:
        client.completions.create(model="tiny", prompt="one two three", max_tokens=30, extra_body=ALL)
    def measured(name):
        """Values of the views; a first token may come in another interval than the end of its request."""
        return [line["view"][name] for line in lines_of(manager, "scale", "small") if line["view"][name]]

    for name in ("num_ended", "prompt_tokens", "output_tokens", "itl_s", "ttft_s"):
        assert all(value > 0 for value in wait_until(name, lambda name=name: measured(name)))
    assert measured("output_tokens")[-1] >= 4 and max(measured("itl_s")) < 10 and measured("start_s")
    shown = httpx.get(f"{manager.url}/control/engines").json()["scaling"]["small"]
    assert (shown["engines"], shown["min"], shown["max"]) == (["small"], 1, 2)
    assert "are running" in shown["decisions"][0]["reason"]
    metrics = httpx.get(f"{manager.url}/metrics").text
    assert 'sagellm_scaling_decisions_total{action="keep",pool="small"}' in metrics
    assert 'sagellm_scaling_target_engines{pool="small"} 1.0' in metrics
    told = CliRunner().invoke(main, ["engine", "status", "--url", manager.url]).output
    assert "pool small: 1 of 1 to 2 engines; busy: keep 1, " in told and "pool dry: 1 of 1 to 2 engines; two: would" in told
    found = verify_scaling(manager.config.record)
    assert found.agrees and set(found.pools) == {"small", "dry", "faulty"}
