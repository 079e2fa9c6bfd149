"""Profiles and plans for latency targets: measured on a real engine, and chosen where the right choice is known."""

import dataclasses
import json
import math
import shutil

import psutil
import pytest
import yaml

from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.kinds.group import PDGroup
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.sla import measure
from sagellm.control_plane.sla.choose import Planner, Wanted
from sagellm.control_plane.sla.load import read_load
from sagellm.control_plane.sla.measure import Grid, measure_profile
from sagellm.control_plane.sla.profile import Point, SetupCosts, SLAProfile, errors_of, read_profile
from sagellm.control_plane.sla.settings import manager_yaml
from sagellm.control_plane.sla.simulate import Fleet, simulate
from sagellm.core.config import SageConfig
from sagellm.core.errors import CapacityError, ConfigError, SageError
from sagellm.core.step_times import num_pairs
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.replay.schedule.metrics import Targets
from tests.commands import run_sagellm as run

AXES = ["--concurrency", "1,2", "--prompt-tokens", "16,32,48", "--steps", "6", "--rounds", "1"]
SETTINGS = {"device": "cpu", "threads": 1}
FACTS = {
    "model": "m", "block_size": 64, "max_prefill_tokens": 512, "block_bytes": 64 * 1000, "settings": SETTINGS,
    **{f"block_bytes_{workers}": 64 * 1000 // workers for workers in (1, 2)},
}  # fmt: skip
TARGETS = Targets(0.5, 0.05)


@pytest.fixture(scope="module")
def measured(model_folder, tmp_path_factory):
    """(model, file, picture) of a profile that the command measured with a plain engine and one that guesses."""
    folder, place = model_folder("llama"), tmp_path_factory.mktemp("sla")
    words = ["--lookaheads", "0,2", "--device", "cpu", "--threads", 1, "--plot", place / "p.png"]
    done = run("profile", "sla", folder, "--out", place / "p.json", *AXES, *words)
    assert done.exit_code == 0, done.output
    assert "median error of points left out, tensor_parallel 1, lookahead 2: decode" in done.stdout
    return folder, place / "p.json", place / "p.png"


def test_a_profile_of_the_real_engine(measured):
    _, file, picture = measured
    profile = read_profile(file)
    places = [(each.setup, each.concurrency, each.prompt_tokens) for each in profile.points]
    assert places == [((1, k), n, tokens) for k in (0, 2) for n in (1, 2) for tokens in (16, 32, 48)]
    for each in profile.points:
        assert each.prefill_terms[1] == each.concurrency * each.prompt_tokens and each.num_steps >= 4
        assert each.steps_per_s == pytest.approx(each.concurrency / each.step_s)
        assert each.kv_tokens == pytest.approx(each.concurrency * each.context_tokens)
        assert each.context_tokens > each.prompt_tokens
    assert {name: errors["decode"].num_held_out for name, errors in profile.errors.items()} == {
        "tensor_parallel 1, lookahead 0": 6, "tensor_parallel 1, lookahead 2": 6
    }  # fmt: skip
    assert profile.facts["cores"] >= 1 and profile.facts["block_bytes_1"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_started_again_measures_only_what_is_missing(measured, tmp_path, monkeypatch):
    folder, file, _ = measured
    whole, grid = read_profile(file), Grid((1, 2), (16, 32, 48), steps=6, rounds=1)
    settings = whole.facts["settings"]
    begun = tmp_path / "begun.json"
    kept = [each for each in whole.points if each.setup == (1, 0)][:3]
    whole.model_copy(update={"points": tuple(kept), "errors": {}}).write(begun)

    asked, answer = [], measure.answer_greedily

    def interrupted(engine, prompts, max_new_tokens):
        asked.append((len(prompts), len(prompts[0])))
        if len(asked) == 4:  # a warm-up, then two points
            raise KeyboardInterrupt
        return answer(engine, prompts, max_new_tokens)

    monkeypatch.setattr(measure, "answer_greedily", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_profile(str(folder), begun, grid, settings)
    assert asked[1:] == [(2, 16), (2, 32), (2, 48)]
    assert len(read_profile(begun).points) == 5 and list(read_profile(begun).points[:3]) == kept
    monkeypatch.setattr(measure, "answer_greedily", answer)
    done = measure_profile(str(folder), begun, grid, settings)
    assert len(done.points) == 6 and done.errors
    monkeypatch.setattr(measure, "open_engine", None)  # nothing is missing
    assert measure_profile(str(folder), begun, grid, settings).points == done.points


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv-schema", "int8"], "has points of another run: its settings is"),
        (["--engines", 2], "has points of another run: its engines is 1, and here 2"),
        (["--concurrency", "1,2", "--prompt-tokens", "16,32"], "4 points of concurrency and prompt length; give at least 6"),
        (["--prompt-tokens", "16,32,0"], "give whole numbers from 1"),
    ],
)
def test_a_profile_that_cannot_be_measured(measured, words, says):
    folder, file, _ = measured
    before = file.read_bytes()
    done = run("profile", "sla", folder, "--out", file, *AXES, "--device", "cpu", "--threads", 1, *words)
    assert done.exit_code in (1, 2) and says in done.stderr and file.read_bytes() == before


@pytest.mark.slow
def test_an_engine_beside_the_measured_one(measured, tmp_path):
    folder, file, _ = measured
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    done = run("profile", "sla", folder, "--out", tmp_path / "p.json", *AXES, "--device", "cpu", "--threads", 1, "--engines", 2)
    assert done.exit_code == 0, done.output
    beside, alone = read_profile(tmp_path / "p.json"), read_profile(file)
    assert beside.facts["engines"] == 2 and alone.facts["engines"] == 1 and len(beside.points) == len(alone.of((1, 0)))
    left = {each.pid for each in psutil.Process().children(recursive=True) if "resource_tracker" not in "".join(each.cmdline())}
    assert left <= before
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{}")
    with pytest.raises(SageError), measure._neighbours(1, SageConfig(model=broken, device="cpu"), 1, 8):
        pass


def test_a_prompt_beyond_the_model_is_named(measured, tmp_path):
    done = run("profile", "sla", measured[0], "--out", tmp_path / "p.json", *AXES, "--prompt-tokens", "16,32,50000")
    assert done.exit_code == 1 and "of this model; give shorter prompts" in done.stderr


def law(workers, lookahead, concurrency, context):
    """Seconds of a decode step: a device more makes it shorter, guesses make it longer."""
    return (0.02 / workers + 0.001 * concurrency + 1e-7 * concurrency * context) * (1 + 0.1 * lookahead)


def point(workers, lookahead, concurrency, tokens):
    terms = (float(concurrency), float(concurrency * tokens), concurrency * num_pairs(tokens, 0))
    return Point(
        tensor_parallel=workers, lookahead=lookahead, concurrency=concurrency, prompt_tokens=tokens,
        context_tokens=float(tokens), step_s=law(workers, lookahead, concurrency, tokens), num_steps=8,
        prefill_s=(0.01 * terms[0] + 4e-4 * terms[1]) / workers, prefill_terms=terms,
    )  # fmt: skip


def made(workers=(1,), lookaheads=(0,)):
    profile = SLAProfile(facts=FACTS)
    for setup in [(w, k) for w in workers for k in lookaheads]:
        for place in [(n, tokens) for n in (1, 4, 16) for tokens in (64, 512, 2048)]:
            profile = profile.add(point(*setup, *place))
    return profile


def test_between_points_and_the_error_of_those_left_out():
    profile = made()
    (errors,) = profile.errors.values()
    assert errors["decode"].median < 1e-6 and errors["prefill"].median < 1e-6 and errors["decode"].num_held_out == 9
    costs = SetupCosts(profile.of((1, 0)))
    assert costs.step_s(8, 8 * 1000) == pytest.approx(law(1, 0, 8, 1000), rel=1e-3)
    # A point that is off by half is predicted from the others as they are, and shows in the error.
    off = list(profile.points)
    (place,) = (place for place, each in enumerate(off) if (each.concurrency, each.prompt_tokens) == (4, 512))
    off[place] = off[place].model_copy(update={"step_s": 2 * off[place].step_s})
    assert errors_of(off)["decode"].p90 > 0.1
    assert SetupCosts(off).step_s(4, 4 * 512) > 1.3 * law(1, 0, 4, 512)
    assert errors_of(off[:5]) == {}


def test_plans_take_the_mean_speed_of_the_machine_and_errors_the_quickest_rounds(tmp_path):
    profile, quick = SLAProfile(facts=FACTS), point(1, 0, 4, 512)
    assert made().slowdown == 1.0, "a file of before has no means"
    for factor in (1.0, 2.0):  # rounds in which the machine was quick and slow
        for place in [(n, tokens) for n in (1, 4, 16) for tokens in (64, 512, 2048)]:
            each = point(1, 0, *place)
            seconds = factor * each.step_s
            profile = profile.add(each.model_copy(update={"step_s": seconds, "mean_step_s": seconds}))
    assert profile.slowdown == pytest.approx(1.5) and {each.rounds for each in profile.points} == {2}
    (errors,) = profile.errors.values()
    assert errors["decode"].median < 1e-6
    assert profile.costs((1, 0)).step_s(4, 4 * 512) == pytest.approx(1.5 * quick.step_s, rel=1e-3)
    assert profile.costs((1, 0)).prefill_s((1, 100, 0)) == pytest.approx(1.5 * 0.05, rel=1e-3)
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json").slowdown == pytest.approx(1.5)


def test_a_fleet_on_the_virtual_clock():
    costs, limits = SetupCosts(made().points), {"max_prefill_tokens": 512}
    lone = dataclasses.replace(read_load("1", num_requests=2, prompt_tokens=100, output_tokens=11), name="lone")
    lone = dataclasses.replace(lone, requests=lone.requests[:1])
    alone = simulate(lone, Fleet(1, max_batch_size=4, kv_blocks=64), costs, TARGETS, **limits)
    (told,) = alone.requests
    assert told.ttft_s == pytest.approx(0.01 + 0.04, rel=1e-3) and told.tpot_s == pytest.approx(0.021, rel=2e-3)
    assert alone.share == 1.0
    twice = SetupCosts(made().points, 2.0)
    guessed = simulate(lone, Fleet(1, lookahead=2, max_batch_size=4, kv_blocks=64), twice, TARGETS, **limits)
    assert guessed.requests[0].tpot_s == pytest.approx(told.tpot_s / 2, rel=1e-3)

    load = read_load("8", num_requests=120, prompt_tokens=200, output_tokens=20)
    one, two = (simulate(load, Fleet(n, max_batch_size=16, kv_blocks=256), costs, TARGETS, **limits) for n in (1, 2))
    assert two.share > one.share and two.figures.ttft_mean_s < one.figures.ttft_mean_s
    # With prompts on an engine of their own no stream waits for one, except to join.
    split = Fleet(1, prefill=1, max_batch_size=16, kv_blocks=256)
    apart = simulate(load, split, costs, TARGETS, link=Link(latency_s=0.2, bytes_per_s=1e9), kv_bytes_per_token=1000, **limits)
    assert len(apart.requests) == 120 and all(each.num_tokens == 20 for each in apart.requests)
    near = simulate(load, split, costs, TARGETS, **limits)
    assert near.figures.tpot_mean_s < apart.figures.tpot_mean_s
    assert all(each.token_s[1] - each.token_s[0] >= 0.2 for each in apart.requests)  # the transfer lies between these
    assert all(list(each.token_s) == sorted(each.token_s) for each in apart.requests)


def planner(rate, profile=None, devices=3, *, targets=TARGETS, **wanted):
    load = read_load(str(rate), num_requests=60, prompt_tokens=200, output_tokens=20)
    return Planner(profile or made(), [load], Wanted(targets, devices, **wanted))


def chosen(*args, **wanted):
    return planner(*args, **wanted).choose()


def test_the_fewest_devices_that_meet_the_targets():
    light, heavy = chosen(2), chosen(10)
    assert light.meets and light.fleet.devices == 1 and light.scale >= 1
    assert heavy.meets and 1 < heavy.fleet.devices <= 3
    fewer = chosen(10, devices=1)
    assert chosen(10, share=0.99 * fewer.share).fleet.devices == 1  # though more devices have more requests in time
    assert not fewer.meets and fewer.scale == 0 and fewer.limit.startswith(("first token", "time per token"))
    for rate, plan in ((2, light), (10, heavy)):
        assert plan.one_more.fleet.devices == plan.fleet.devices + 1 and plan.one_more.scale > plan.scale
        assert plan.fleet.kv_blocks < plan.fleet.max_batch_size * 5 and not any(each.num_preempted for each in plan.outcomes)
        # Its largest load is met, and a load of half as much more is not.
        shares = [planner(rate).run(plan.fleet, scale)[0].share for scale in (plan.scale, 1.5 * plan.scale)]
        assert shares[0] >= 0.95 > shares[1]


@pytest.mark.slow
def test_tensor_parallel_and_guesses_where_nothing_else_is_quick_enough():
    tight = Targets(0.5, 0.016)  # a step of one device takes 21 ms
    plan = chosen(1, made(workers=(1, 2)), targets=tight)
    assert plan.meets and plan.fleet.tensor_parallel == 2
    assert not chosen(1, targets=tight).meets
    assert "a request alone takes 21 ms" in chosen(1, targets=tight).limit
    guessing = chosen(1, made(lookaheads=(0, 4)), targets=tight, acceptance=0.8)
    assert guessing.meets and guessing.fleet.devices == 1 and guessing.fleet.lookahead == 4
    assert not chosen(1, made(lookaheads=(0, 4)), targets=tight).meets  # no guesses without an acceptance
    assert chosen(1, made(lookaheads=(0, 4)), acceptance=0.0).fleet.lookahead == 0


@pytest.mark.slow
def test_memory_bounds_the_pool():
    room = 16 * FACTS["block_bytes"]
    plan = chosen(2, memory=room + 1000, weight_bytes=1000)
    assert plan.fleet.kv_blocks == 16 < chosen(2).fleet.kv_blocks
    assert chosen(2, memory=1 << 40).fleet == chosen(2).fleet
    with pytest.raises(CapacityError, match="Give more --devices or --memory"):
        chosen(2, memory=1000, weight_bytes=1000)


@pytest.mark.slow
def test_a_plan_is_a_file_for_the_manager(measured):
    folder, file, _ = measured
    profile = read_profile(file)
    fleet = Fleet(1, max_batch_size=2, kv_blocks=20, lookahead=2)
    whole = yaml.safe_load(manager_yaml(profile, fleet, str(folder), "ngram"))
    (settings,) = ManagerConfig(**whole).engines.values()
    assert (settings["max_batch_size"], settings["kv_blocks"], settings["threads"]) == (2, 20, 1)
    with ControlPlaneManager(ManagerConfig(port=0, **whole), publish=False) as manager:
        (told,) = manager.engines()
        assert told["state"] == "ready" and told["models"] == [folder.name]
    split = yaml.safe_load(manager_yaml(profile, Fleet(2, prefill=1, max_batch_size=2, kv_blocks=20), str(folder)))
    (group,) = split["engines"].values()
    made = PDGroup(**{name: value for name, value in group.items() if name != "kind"})
    assert made.numbers == {"prefill": 1, "decode": 2, "hybrid": 0}
    assert group["flags"][group["flags"].index("--kv-blocks") + 1] == "20"


def test_the_command_plans_from_a_measured_profile(measured, tmp_path):
    folder, file, _ = measured
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 300 * n, "input_length": 20 + n, "output_length": 6, "hash_ids": [n]} for n in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["plan", folder, "--profile", file, "--load", trace, "--ttft-ms", 60000, "--itl-ms", 60000, "--devices", 2]
    done = run(*words, "--json", "--write-config", tmp_path / "up.yaml")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["meets"] and told["fleet"]["devices"] == 1 and told["one_more_device"]["fleet"]["devices"] == 2
    assert told["fleet"]["pipeline_parallel"] == "1: LMDeploy has no pipeline parallelism"
    assert told["loads"][0]["requests"] == 20 and told["loads"][0]["prompt_tokens"] == pytest.approx(29.5)
    assert told["config"] == (tmp_path / "up.yaml").read_text()
    table = run(*words)
    for text in ("one more device", "limit: ", "LMDeploy has no pipeline parallelism", "KV blocks of an engine", "up to "):
        assert text in table.stdout
    missed = run(*words, "--itl-ms", "0.001", "--write-config", tmp_path / "no.yaml")
    assert missed.exit_code == 1 and "meets the targets; this is the closest" in missed.stderr
    assert not (tmp_path / "no.yaml").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "a plan needs a load"),
        (["--load", "-2"], "the rate -2 is not above 0"),
        (["--load", "missing.jsonl"], "missing.jsonl"),
        (["--load", "2", "--profile", "missing.json"], "cannot read the profile missing.json"),
        (["--load", "2", "--profile", __file__], "is not JSON"),
    ],
)
def test_a_plan_that_is_refused(measured, words, says):
    done = run("plan", measured[0], "--profile", measured[1], *words)
    assert done.exit_code == 2 and says in done.stderr


def test_a_profile_of_another_model_is_refused(measured, model_folder):
    done = run("plan", model_folder("qwen2"), "--profile", measured[1], "--load", "2")
    assert done.exit_code == 2 and "profile this one" in done.stderr


def test_plan_needs_memory_or_a_profile(measured):
    done = run("plan", measured[0])
    assert done.exit_code == 2 and "give --memory to plan weights" in done.stderr


def test_a_damaged_profile_is_named(tmp_path):
    file = tmp_path / "p.json"
    made().write(file)
    broken = json.loads(file.read_text())
    broken["points"][0]["step_s"] = -1
    file.write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match=r"points\.0\.step_s"):
        read_profile(file)
    with pytest.raises(SageError, match="cannot write"):
        made().write(tmp_path / "missing" / "p.json")
    assert math.isnan(SLAProfile(facts=FACTS).worst_error)
