"""Plans on an engine: who runs in which step, and what is said of each node."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, StepResult
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import NodeState, PlanState
from sagellm.scheduler_ir.plan_runner import NUM_ENDED, PlanRunner
from tests.scheduler_ir.fake_engine import FakeEngine
from tests.scheduler_ir.made_plans import collective, decode, detail, plan, prefill, sample, start, states

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


TWO_CHUNKS = plan(
    "p", prefill("a", 1, 0, 60), prefill("b", 1, 60, 40, ["a"]), sample("s", [1], ["b"]), decode("d", [1], ["s"]),
    sample("t", [1], ["d"]),
)  # fmt: skip


# ---- order, phase, cuts


def test_the_steps_are_those_of_the_plan():
    runner, fake = start(TWO_CHUNKS, requests=[(1, 100)])
    fake.run()
    assert fake.steps[:3] == [(PREFILL, {1: 60}), (PREFILL, {1: 40}), (DECODE, {1: 1})]
    status = runner.status("p")
    assert status.state is PlanState.DONE and not status.refused()
    assert set(states(runner).values()) == {"done"}


def test_requests_of_plans_run_in_the_order_of_plans_and_before_others():
    first, second = plan("p", prefill("a", 3, 0, 400)), plan("q", prefill("b", 2, 0, 400))
    _, fake = start(first, second, requests=[(1, 400), (2, 400), (3, 400)])
    fake.run()
    assert [list(computed) for phase, computed in fake.steps if phase is PREFILL] == [[3], [2], [1]]


def test_others_go_along_behind():
    _, fake = start(plan("p", prefill("a", 2, 0, 100)), requests=[(1, 100), (2, 100)])
    fake.run()
    assert list(fake.steps[0][1]) == [2, 1]


def test_a_request_whose_node_is_not_ready_is_held():
    waits = plan("p", prefill("a", 1, 0, 100), decode("d", [1], ["a"]), prefill("b", 2, 0, 100, ["d"]))
    runner, fake = start(waits)
    fake.run()
    assert fake.steps[:3] == [(PREFILL, {1: 100}), (DECODE, {1: 1}), (PREFILL, {2: 100})]
    assert set(states(runner).values()) == {"done"}
    assert fake.decisions[0].hold == {2} and "plan p" in fake.decisions[0].reasons[2]


def test_of_two_cuts_one_waits():
    runner, fake = start(plan("p", prefill("a", 1, 0, 60), prefill("b", 2, 0, 60)))
    fake.run()
    assert fake.steps[:2] == [(PREFILL, {1: 60}), (PREFILL, {2: 60, 1: 40})]
    assert states(runner) == {"a": "done", "b": "done"}


def test_nodes_that_may_run_together_share_a_step():
    nodes = [prefill("a", 1, 0, 100), prefill("b", 2, 0, 100), decode("d", [1], ["a"]), decode("e", [2], ["b"])]
    runner, fake = start(plan("p", *nodes))
    fake.run()
    assert fake.steps[:2] == [(PREFILL, {1: 100, 2: 100}), (DECODE, {1: 1, 2: 1})]
    assert set(states(runner).values()) == {"done"}


@pytest.mark.parametrize("engine", [{}, {"names_requests": False}, {"is_ahead": True}])
def test_a_decode_step_takes_all_of_its_requests_at_once(engine):
    nodes = [prefill("a", 1, 0, 100), prefill("b", 2, 0, 100, ["a"]), decode("d", [1, 2], ["a", "b"]), decode("e", [2], ["d"])]
    runner, fake = start(plan("p", *nodes), **engine)
    fake.run()
    assert fake.steps[:4] == [(PREFILL, {1: 100}), (PREFILL, {2: 100}), (DECODE, {1: 1, 2: 1}), (DECODE, {2: 1, 1: 1})]
    assert set(states(runner).values()) == {"done"}


# ---- what the engine does otherwise


def test_an_engine_that_cuts_no_prompt_says_so_of_the_node():
    runner, fake = start(TWO_CHUNKS, requests=[(1, 100)], can_cut=False)
    fake.run()
    assert fake.steps[0] == (PREFILL, {1: 100})
    assert states(runner) == {"a": "refused", "b": "refused", "s": "done", "d": "done", "t": "done"}
    assert "cuts no prompt" in detail(runner, "a") and "step 1" in detail(runner, "a")
    assert "not in a step of its own" in detail(runner, "b")


def test_what_the_cache_holds_is_not_computed():
    fetch = IRNode("f", NodeType.PREFIX_FETCH, (), ("f",), {"request": 1, "tokens": 64})
    wanted = plan("p", fetch, prefill("a", 1, 64, 36, ["f"]), decode("d", [1], ["a"]))
    runner, fake = start(wanted, requests=[])
    fake.add(1, 100, cached=64)
    fake.run()
    assert fake.steps[0] == (PREFILL, {1: 36}) and set(states(runner).values()) <= {"done", "refused"}
    assert states(runner)["f"] == "done" and "64 tokens were there" in detail(runner, "f")


def test_a_prefix_that_is_not_there_is_computed_and_it_is_said():
    fetch = IRNode("f", NodeType.PREFIX_FETCH, (), ("f",), {"request": 1, "tokens": 64})
    runner, fake = start(plan("p", fetch, prefill("a", 1, 64, 36, ["f"]), decode("d", [1], ["a"])), requests=[(1, 100)])
    fake.run()
    assert fake.steps[0] == (PREFILL, {1: 100})
    assert states(runner) == {"f": "refused", "a": "refused", "d": "done"}
    assert "0 tokens were found" in detail(runner, "f") and "tokens 0 to 63 were not there" in detail(runner, "a")


def test_a_longer_plan_than_the_prompt():
    runner, fake = start(plan("p", prefill("a", 1, 0, 500)), requests=[(1, 100)])
    fake.run()
    assert states(runner) == {"a": "refused"} and "has 100 tokens" in detail(runner, "a")


def test_a_decode_step_with_no_prefill_before_it_computes_the_prompt_first():
    runner, fake = start(plan("p", decode("d", [1])), requests=[(1, 100)])
    fake.run()
    assert fake.steps[:2] == [(PREFILL, {1: 100}), (DECODE, {1: 1})]
    assert states(runner) == {"d": "done"} and "no node computes" in detail(runner, "d")


@pytest.mark.parametrize("kind, config", [
    (NodeType.KV_TRANSFER, {"start": 0, "tokens": 9, "src_instance": "a", "dst_instance": "b", "bytes": 1, "request": 1}),
    (NodeType.KV_STORE, {"start": 0, "tokens": 9, "src_tier": "gpu", "dst_tier": "cpu", "bytes": 1, "request": 1}),
    (NodeType.COLLECTIVE, {"op": "all_reduce", "bytes": 1, "group": "g"}),
    (NodeType.VERIFY, {"requests": [1], "drafts": [2]}),
])  # fmt: skip
def test_what_this_engine_cannot_do_is_refused_and_the_rest_goes_on(kind, config):
    other = IRNode("x", kind, (), ("x",), config)
    runner = PlanRunner(wait_for_requests=True)
    fake = FakeEngine(runner)
    fake.add(1, 100)
    status = runner.submit_plan(plan("p", other, sample("s", [1], ["x"]), decode("d", [1], ["x"]), requests=[1]))
    if kind in (NodeType.KV_TRANSFER, NodeType.COLLECTIVE):  # that is known at once
        assert status.nodes["x"].state is NodeState.REFUSED
    fake.run()
    assert states(runner) == {"x": "refused", "s": "refused", "d": "done"}  # nothing to draw from
    assert len(detail(runner, "x")) > 20


def test_a_node_for_another_device_ran_here_and_it_is_said():
    there = IRNode("a", NodeType.PREFILL_CHUNK, (), ("a",), {"request": 1, "start": 0, "tokens": 100}, "gpu:7")
    here = IRNode("d", NodeType.DECODE_STEP, ("a",), ("d",), {"requests": [1]}, "cpu:0")
    runner, fake = start(plan("p", there, here), requests=[(1, 100)], options={"devices": ["cpu:0"]})
    fake.run()
    assert states(runner) == {"a": "refused", "d": "done"} and "gpu:7" in detail(runner, "a")


def test_a_preempted_request_is_computed_again_and_its_nodes_say_so():
    nodes = [prefill("a", 1, 0, 60), prefill("b", 2, 0, 60, ["a"])]
    for number in range(8):
        nodes.append(decode(f"d{number}", [1, 2], [nodes[-1].node_id]))
    runner, fake = start(plan("p", *nodes), requests=[(1, 60, 40), (2, 60, 40)], blocks=8)
    seen = set()
    for _ in range(300):
        if fake.queue:
            fake.once()
            seen.add((states(runner)["b"], detail(runner, "b")))
    assert fake.preempted and fake.ended and not fake.queue
    assert any(state in ("waiting", "running") and "lost its blocks" in text for state, text in seen)
    assert not {"waiting", "running"} & set(states(runner).values())


def test_a_request_that_ends_cancels_what_is_left_of_it():
    nodes = [prefill("a", 1, 0, 100), *(decode(f"d{number}", [1], ["a"]) for number in range(5))]
    runner, fake = start(plan("p", *nodes), requests=[(1, 100, 3)])
    fake.run()
    assert list(states(runner).values()) == ["done"] * 3 + ["cancelled"] * 3
    assert "request 1 ended" in detail(runner, "d4")
    assert runner.status("p").state is PlanState.DONE


def test_an_aborted_request_does_not_stop_the_others():
    wanted = plan("p", prefill("a", 1, 0, 100), prefill("b", 2, 0, 100, ["a"]), decode("d", [1, 2], ["b"]))
    runner, fake = start(wanted)
    fake.once()
    fake.abort(1)
    fake.run()
    assert states(runner) == {"a": "done", "b": "done", "d": "done"}
    assert fake.ended == [1, 2]


def test_who_is_held_in_vain_goes_on_without_the_plan():
    wanted = plan("p", prefill("a", 9, 0, 100), prefill("b", 1, 0, 100, ["a"]))  # 9 never comes
    runner, fake = start(wanted, requests=[(1, 100)], options={"patience_s": 5})
    fake.run()
    assert states(runner)["b"] == "refused" and "held for 5 s" in detail(runner, "b")
    assert runner.status("p").state is PlanState.QUEUED  # still there for 9
    assert runner.report()["requests_given_up"] == 1


def test_no_deadlock_where_a_held_request_keeps_the_blocks():
    nodes = [prefill("a", 1, 0, 100), prefill("b", 2, 0, 100, ["a"]), decode("d", [1], ["b"])]
    runner, fake = start(plan("p", *nodes), blocks=8, options={"patience_s": 3})
    fake.run()
    assert sorted(fake.ended) == [1, 2] and states(runner)["d"] == "refused"


# ---- submitting


def test_bad_plans_say_what_is_wrong():
    runner, fake = start(requests=[(1, 100), (2, 100), (3, 100)], options={"instance_id": "here"})
    runner._may_wait = False
    fake.once()
    runner.submit_plan(plan("p", decode("d", [1])))
    with pytest.raises(PlanError, match="submitted before"):
        runner.submit_plan(plan("p", decode("d", [2])))
    with pytest.raises(PlanError, match="request 1 is of plan p"):
        runner.submit_plan(plan("q", decode("d", [1])))
    with pytest.raises(PlanError, match="request 77 is unknown"):
        runner.submit_plan(plan("q", decode("d", [77])))
    with pytest.raises(PlanError, match="for instance 'there'; this one is 'here'"):
        runner.submit_plan(plan("q", decode("d", [2]), target="there"))
    with pytest.raises(PlanError, match="->"):
        runner.submit_plan(plan("q", decode("d", [2], ["e"]), decode("e", [2], ["d"])))
    with pytest.raises(PlanError, match="unknown plan 'z'"):
        runner.status("z")
    with pytest.raises(PlanError, match="unknown plan 'z'"):
        runner.cancel("z")
    fake.run()
    with pytest.raises(PlanError, match="request 2 has ended"):
        runner.submit_plan(plan("q", decode("d", [2])))
    with pytest.raises(PlanError, match="plan p is done"):
        runner.cancel("p")
    runner.close()
    with pytest.raises(PlanError, match="switched off"):
        runner.submit_plan(plan("r", decode("d", [2])))


def test_a_refused_plan_leaves_nothing_behind():
    runner, fake = start(requests=[(1, 100)])
    with pytest.raises(PlanError):
        runner.submit_plan(plan("p", decode("d", [1], ["e"]), decode("e", [1], ["d"])))
    runner.submit_plan(plan("p", prefill("a", 1, 0, 100)))
    fake.run()
    assert states(runner) == {"a": "done"}


def test_a_cancelled_plan_lets_its_requests_go():
    runner, fake = start(plan("p", prefill("a", 1, 0, 60), prefill("b", 2, 0, 100, ["a"])))
    fake.once()
    status = runner.cancel("p")
    assert status.state is PlanState.CANCELLED
    assert {name: each.state.value for name, each in status.nodes.items()} == {"a": "done", "b": "cancelled"}
    with pytest.raises(PlanError, match="is cancelled"):
        runner.cancel("p")
    runner.submit_plan(plan("q", decode("d", [2])))
    fake.run()
    assert states(runner, "q") == {"d": "done"} and sorted(fake.ended) == [1, 2]


def test_what_is_on_its_way_when_a_plan_is_cancelled_is_finished():
    runner, fake = start(plan("p", prefill("a", 1, 0, 100), decode("d", [1], ["a"])), requests=[(1, 100)], is_ahead=True)
    fake.once()
    assert states(runner)["a"] == "running"
    runner.cancel("p")
    assert states(runner) == {"a": "running", "d": "cancelled"}
    fake.once()
    assert states(runner) == {"a": "done", "d": "cancelled"}


def test_what_was_asked_and_not_begun_when_a_plan_is_cancelled_is_cancelled():
    runner, fake = start(plan("p", prefill("a", 1, 0, 100)), requests=[(1, 100)], blocks=1)  # no room for it
    fake.once()
    runner.cancel("p")
    assert states(runner) == {"a": "running"}  # for all that is known
    fake.once()
    assert states(runner) == {"a": "cancelled"}


def test_a_request_ahead_of_the_others_goes_on_with_its_next_node():
    runner, fake = start(plan("p", decode("d", [1, 2]), decode("e", [1])))
    fake.once()
    for step in (5, 6):
        runner.on_step_end(StepResult(step, DECODE, 1, 1, 0.0, computed=((1, 1),)))
    assert states(runner) == {"d": "waiting", "e": "done"} and "step 6" in detail(runner, "e")


@pytest.mark.parametrize("options", [
    {"patience_s": 0}, {"patience_s": 60}, {"patience_s": True}, {"patience_s": "1"}, {"keep_plans": -1}, {"keep_plans": 1.5},
])  # fmt: skip
def test_bad_options(options):
    with pytest.raises(PlanError, match=next(iter(options))):
        PlanRunner(**options)


def rules(fake):
    """Return the backends of the steps, by the first letter; a point without a rule."""
    return "".join([decision.collectives[0].backend[0] if decision.collectives else "." for decision in fake.decisions])


def test_collectives_are_done_as_a_node_wants_it_until_its_plan_ends():
    runner, fake = start(
        plan("p", prefill("a", 1, 0, 100), collective("c", after=["a"]), sample("s", [1], ["c"]), decode("d", [1], ["c"])),
        requests=[(1, 100)],
    )
    fake.run()
    assert rules(fake) == ".s.." and set(states(runner).values()) == {"done"}
    assert detail(runner, "c") == "by shm from step 2 on"


def test_a_plan_of_collectives_alone_lasts_as_long_as_its_requests():
    runner, fake = start(plan("p", collective("c"), requests=[2]), requests=[(1, 100)])
    fake.run()
    assert rules(fake) == "...." and states(runner) == {"c": "waiting"}
    fake.add(2, 100)
    fake.add(3, 100, 8)
    fake.run()
    assert rules(fake)[4:] == "ssss...." and states(runner) == {"c": "done"}
    assert fake.decisions[4].hold == frozenset()


def test_of_two_nodes_about_one_sort_the_first_plan_has_its_way():
    other = [collective("same", "group", 600), collective("other", "group", 4096)]
    runner, fake = start(plan("p", collective("c"), requests=[1]), plan("q", *other, requests=[2]), requests=[(1, 9), (2, 9)])
    fake.once()
    assert [rule.backend for rule in fake.decisions[0].collectives] == ["shm", "group"]
    assert states(runner, "q") == {"same": "waiting", "other": "running"}
    assert runner.cancel("p").nodes["c"].detail == "by shm from step 1 on; the plan was cancelled"
    fake.once()
    assert sorted(fake.decisions[1].collectives) == [
        ("all_reduce", 600, "group", None, True), ("all_reduce", 4096, "group", None, True)
    ]
    fake.run()
    assert set(states(runner, "q").values()) == {"done"} and rules(fake)[-1] == "g"


@pytest.mark.parametrize("wish, why", [
    ({"backend": "nvshmem"}, "all_reduce can be done by group, shm"), ({"op": "all_to_all"}, "no backend does all_to_all"),
    ({"group": "dp"}, "the group tp of all workers, not dp"), ({"pieces": 3}, "in 1 to 2 pieces, not 3"),
])  # fmt: skip
def test_collectives_that_no_engine_does_so(wish, why):
    runner, fake = start(plan("p", collective("c", **wish), requests=[1]))
    fake.run()
    assert why in runner.status("p").refused()["c"] and set(rules(fake)) == {"."}


def test_one_worker_has_no_collectives():
    runner = PlanRunner(wait_for_requests=True)
    fake = FakeEngine(runner)
    fake.add(1)
    runner.submit_plan(plan("p", collective("c"), requests=[1]))
    fake.run()
    assert "one worker" in runner.status("p").refused()["c"]


def test_a_node_whose_wish_is_no_wish():
    for wish in ({"backend": 7}, {"backend": ""}, {"pieces": 0}, {"pieces": 1.5}):
        with pytest.raises(PlanError, match=next(iter(wish))):
            collective("c", **wish)


def test_finished_plans_are_forgotten_in_the_end():
    runner = PlanRunner(keep_plans=1, wait_for_requests=True)
    for name in "abc":
        node = IRNode("x", NodeType.COLLECTIVE, config={"op": "sum", "bytes": 1, "group": "g"})
        runner.submit_plan(plan(name, node, requests=[1]))
    assert runner.status("c").state is PlanState.DONE
    with pytest.raises(PlanError, match="that are kept: 1"):
        runner.status("b")


def test_plans_come_from_any_thread_while_the_engine_runs():
    runner, fake = start(requests=[(number, 50, 30) for number in range(40)], max_batch=64)

    def submit(first):
        for number in range(first, 40, 4):
            runner.submit_plan(plan(f"p{number}", decode("d", [number]), decode("e", [number], ["d"])))
            runner.status(f"p{number}")

    with ThreadPoolExecutor(4) as threads:
        submitted = threads.map(submit, range(4))
        for _ in range(5):
            fake.once()
        list(submitted)
    fake.run()
    assert sorted(fake.ended) == list(range(40))
    assert all(not runner.status(f"p{number}").refused() for number in range(40))


def test_a_result_after_the_end_does_not_bring_a_request_back():
    runner, fake = start(requests=[(1, 100)])
    fake.run()
    runner.on_step_end(StepResult(99, DECODE, 1, 1, 0.0, computed=((1, 1),)))  # was on its way when the request ended
    with pytest.raises(PlanError, match="request 1 has ended"):
        runner.submit_plan(plan("p", decode("d", [1])))


def test_an_id_that_is_used_again_is_a_new_request():
    runner, fake = start(requests=[(1, 100)])
    fake.run()
    fake.add(1, 100)
    fake.once()
    runner.submit_plan(plan("p", decode("d", [1])))
    fake.run()
    assert states(runner) == {"d": "done"}


def test_the_ends_of_many_requests_are_remembered():
    runner = PlanRunner(wait_for_requests=True)
    for number in range(NUM_ENDED + 5):
        runner.on_request_end(number)
    runner.on_request_end(7)  # told twice: it counts once, as the latest
    runner.on_request_end(NUM_ENDED + 5)
    for number in (7, NUM_ENDED, 8):
        with pytest.raises(PlanError, match=f"request {number} has ended"):
            runner.submit_plan(plan("p", decode("d", [number])))
    runner.submit_plan(plan("q", decode("d", [5])))  # so long ago that it is forgotten
    asked = _Counted(3 * NUM_ENDED)
    wanted = plan("r", decode("d", [asked]), requests=[asked])
    asked.num_compared = 0
    runner.submit_plan(wanted)
    assert asked.num_compared < 20  # not once for each that has ended


class _Counted(int):
    """Counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        self.num_compared += 1
        return int(self) == other


def test_a_plan_that_was_cancelled_before_any_step_leaves_its_requests_to_others():
    runner, fake = start(plan("p", prefill("a", 1, 0, 60)), requests=[(1, 100)])
    assert runner.cancel("p").state is PlanState.CANCELLED
    runner.submit_plan(plan("q", prefill("b", 1, 0, 100)))
    fake.run()
    assert fake.steps[0] == (PREFILL, {1: 100}) and states(runner, "q") == {"b": "done"}
    assert runner.status("p").state is PlanState.CANCELLED


def test_a_runner_that_is_closed_ends_plans_that_no_step_has_seen():
    runner, _ = start(plan("p", prefill("a", 1, 0, 60)), requests=[])
    runner.close()
    assert runner.status("p").state is PlanState.CANCELLED and "has ended" in detail(runner, "a")
