"""Plans of what hides behind computation against every order there is, and windows on real groups."""

import itertools
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.comm_backend import CommConfig, OverlapWindow, ReduceOp, Work
from sagellm.comm_backend.contract.fleet import ProcessFleet
from sagellm.comm_backend.contract.seat import Task
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.comm_backend.overlap import Collective, Segment, Step, contention, plan_overlap, predict
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.torch_groups import GlooBackend
from sagellm.core.errors import CommError, CommTimeoutError


def steps(text):
    kinds = {"c": "compute", "s": "start", "w": "wait"}
    return tuple(Step(kinds[word[0]], word[1:]) for word in text.split())


# Two halves of a batch, each computed, reduced, and computed on: the reduction of one hides behind the other.
HALVES = [
    Segment("a1", 3), Collective("r1", 2, ("a1",)), Segment("b1", 1, ("r1",)),
    Segment("a2", 3), Collective("r2", 2, ("a2",)), Segment("b2", 1, ("r2",)),
]  # fmt: skip


def test_halves_of_a_batch():
    plan = plan_overlap(HALVES)
    assert (plan.compute_s, plan.comm_s, plan.serial_s) == (8, 4, 12)
    # a1, then r1 behind a2, then b1 in front of what is left of r2.
    assert plan.steps == steps("ca1 sr1 ca2 sr2 wr1 cb1 wr2 cb2")
    assert plan.total_s == 9 and plan.exposed_s == 1 and plan.hidden_share == 0.75


def test_where_both_want_one_core_nothing_is_reordered():
    plan = plan_overlap(HALVES, slowdown=1.0)
    assert plan.total_s == plan.serial_s and plan.hidden_share == 0
    assert plan.steps == steps("ca1 sr1 wr1 cb1 ca2 sr2 wr2 cb2")
    assert plan_overlap(HALVES, slowdown=2.0).total_s == 12


def test_a_chain_hides_nothing():
    chain = [Segment("a", 1), Collective("r", 5, ("a",)), Segment("b", 1, ("r",))]
    assert plan_overlap(chain).exposed_s == 5


def test_predictions_by_hand():
    tasks = [Segment("a", 4), Collective("r", 2), Collective("q", 6)]
    assert predict(tasks, steps("sr sq ca wr wq")) == 8
    assert predict(tasks, steps("sr sq ca wr wq"), slowdown=0.5) == 10  # 4 of both take 6, then 4 of q alone
    assert predict(tasks, steps("sr wr sq ca wq"), slowdown=1.0) == 12
    assert predict(tasks, steps("sr sq wq ca"), 0.5) == 12


def test_nothing_at_all():
    plan = plan_overlap([])
    assert plan.steps == () and plan.total_s == plan.hidden_share == 0


@pytest.mark.parametrize(
    ("compute_s", "comm_s", "together_s", "found"), [(4, 2, 4, 0), (4, 2, 6, 1), (2, 4, 5, 0.5), (4, 2, 3, 0), (1, 1, 3, 2)]
)
def test_contention(compute_s, comm_s, together_s, found):
    assert contention(compute_s, comm_s, together_s) == found
    tasks = [Segment("a", compute_s), Collective("r", comm_s)]
    if together_s >= max(compute_s, comm_s):
        assert predict(tasks, steps("sr ca wr"), found) == together_s


MISTAKES = {
    "twice": ([Segment("a", 1), Collective("a", 1)], 0, "a is there twice"),
    "later": ([Segment("a", 1, ("b",)), Segment("b", 1)], 0, "a needs b, which do not come before it"),
    "negative": ([Segment("a", -1)], 0, "takes -1 s; give seconds from 0 on"),
    "endless": ([Segment("a", float("inf"))], 0, "takes inf s"),
    "slowdown": ([], -1, "slowdown is -1"),
    "no number": ([], float("nan"), "slowdown is nan"),
}


@pytest.mark.parametrize(("tasks", "slowdown", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_tasks_that_make_no_sense(tasks, slowdown, text):
    with pytest.raises(CommError, match=text):
        plan_overlap(tasks, slowdown)


@st.composite
def task_lists(draw, most=6):
    tasks = []
    for number in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from([Segment, Collective]))
        needs = draw(st.sets(st.sampled_from([task.name for task in tasks]), max_size=2)) if tasks else set()
        tasks.append(kind(f"t{number}", draw(st.integers(0, 6)), tuple(sorted(needs))))
    return tasks


def tick(tasks, plan_steps, slowdown):
    """Time in units, told by counting: what runs alone does two ticks of work a unit, both together 2 / (1 + slowdown) each."""
    work = {task.name: task.seconds * 2 for task in tasks}
    started, now = [], 0
    for kind, name in plan_steps:
        if kind == "start":
            started.append(name)
            continue
        if kind == "compute":
            left = work[name]
            while left:
                queue = [each for each in started if work[each]]
                now += (1 + slowdown) if queue else 1
                left -= 1
                if queue:
                    work[queue[0]] -= 1
        else:
            while work[name]:
                work[next(each for each in started if work[each])] -= 1
                now += 1
    return now / 2


def in_order(tasks, order):
    place = {name: number for number, name in enumerate(order)}
    return all(place[need] < place[task.name] for task in tasks for need in task.needs)


def check_steps(tasks, plan):
    """Each is computed, or started and waited for, once, after what it needs."""
    ended, started = set(), set()
    needs = {task.name: set(task.needs) for task in tasks}
    for kind, name in plan.steps:
        if kind == "wait":
            assert name in started and name not in ended
            ended.add(name)
        else:
            assert needs[name] <= ended and name not in started
            started.add(name)
            if kind == "compute":
                ended.add(name)
    assert ended == needs.keys()


@settings(max_examples=150)
@given(task_lists(), st.sampled_from([0, 1, 2]))
def test_plans_against_every_order(tasks, slowdown):
    plan = plan_overlap(tasks, slowdown)
    check_steps(tasks, plan)
    assert plan.total_s == pytest.approx(tick(tasks, plan.steps, slowdown))
    assert plan.total_s <= plan.serial_s + 1e-9
    orders = [order for order in itertools.permutations(tasks) if in_order(tasks, [task.name for task in order])]
    eager = [predict(tasks, eager_steps(order), slowdown) for order in orders]
    best = min(*eager, plan.serial_s)
    assert best - 1e-9 <= plan.total_s <= predict(tasks, eager_steps(tasks), slowdown) + 1e-9
    # Graham's bound of list scheduling on two machines.
    assert plan.total_s <= 1.5 * best + 1e-9 or slowdown


def eager_steps(order):
    """Start at once, wait where needed."""
    found, pending = [], []
    collectives = {task.name for task in order if isinstance(task, Collective)}
    for task in order:
        for need in task.needs:
            if need in pending:
                pending.remove(need)
                found.append(Step("wait", need))
        found.append(Step("start" if task.name in collectives else "compute", task.name))
        if task.name in collectives:
            pending.append(task.name)
    return found + [Step("wait", name) for name in pending]


# ---- windows


def window_of(seat):
    """A window whose values show whether everything came in order; played on processes."""
    backend = seat.open()
    rows = [torch.full((4096,), float(seat.rank + k)) for k in range(2)]
    window, sums = OverlapWindow(backend), []

    def fill(k):
        rows[k].fill_(seat.rank + k)

    for k in range(2):
        window.compute(f"a{k}", lambda k=k: fill(k))
        window.collective(f"r{k}", lambda k=k: backend.all_reduce(rows[k], async_op=True), needs=(f"a{k}",))
        window.compute(f"b{k}", lambda k=k: sums.append(float(rows[k][0])), needs=(f"r{k}",))
    window.measure(rounds=2)
    plan = window.plan()
    sums.clear()
    run = window.run(plan)
    expected = [sum(rank + k for rank in range(seat.world_size)) for k in range(2)]
    assert sorted(sums) == expected, sums
    assert 0 <= run.waited_s <= run.total_s
    assert all(task.seconds > 0 for task in window.tasks)
    # The same costs, and so the same plan, on every rank.
    costs = torch.tensor([*(task.seconds for task in window.tasks), window.slowdown], dtype=torch.float64)
    low, high = costs.clone(), costs.clone()
    backend.all_reduce(low, ReduceOp.MIN)
    backend.all_reduce(high, ReduceOp.MAX)
    assert torch.equal(low, high)


@pytest.mark.parametrize("kind", [GlooBackend, ShmBackend])
def test_a_window_on_processes(kind):
    with ProcessFleet(2, 120.0) as fleet:
        place = fleet.rendezvous("file")
        facts = fleet.play(window_of, [Task(kind, "own", rank, 2, place, {}, 0) for rank in range(2)])
    assert None not in facts and [report for each in facts for report in each.reports] == []


def alone():
    return MemoryBackend(CommConfig(backend="memory", rank=0, world_size=1, rendezvous=f"memory://{uuid.uuid4().hex}"))


class EndsWith(Work):
    """A transfer that goes on until an event is set."""

    def __init__(self, event):
        self._event = event

    def is_completed(self):
        return self._event.is_set()

    def wait(self):
        assert self._event.wait(20), "waited for before what ends it was computed"


def test_a_run_follows_its_plan():
    with alone() as backend:
        window, event, ran = OverlapWindow(backend), threading.Event(), []

        def start():
            ran.append("r")
            return EndsWith(event)

        window.collective("r", start)
        window.compute("a", lambda: (ran.append("a"), event.set()))
        window.compute("b", lambda: ran.append("b"), needs=("r",))
        window.costs({"r": 2.0, "a": 3.0, "b": 1.0})
        plan = window.plan()
        assert plan.hidden_share == 1 and plan.steps == steps("sr ca wr cb")
        window.run(plan)
        assert ran == ["r", "a", "b"]


def test_a_failure_is_raised_and_nothing_goes_on_behind_it():
    place, through = f"memory://{uuid.uuid4().hex}", threading.Barrier(2)

    def rank(number):
        config = CommConfig(backend="memory", rank=number, world_size=2, rendezvous=place, timeout_s=0.3)
        with MemoryBackend(config) as backend:
            if number == 0:
                window, works = OverlapWindow(backend), []

                def start():
                    works.append(backend.all_reduce(torch.ones(3), async_op=True))
                    return works[-1]

                window.collective("r", start)
                window.collective("q", start)
                window.compute("a", lambda: None, needs=("r",))
                with pytest.raises(CommTimeoutError):
                    window.run(window.plan())
                assert len(works) >= 1 and all(work.is_completed() for work in works)
            through.wait(20)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [True, True]


def test_misuse_of_a_window():
    with alone() as backend:
        window = OverlapWindow(backend)
        window.compute("a", lambda: None)
        with pytest.raises(CommError, match="a is there twice"):
            window.compute("a", lambda: None)
        with pytest.raises(CommError, match="needs r, which do not come before"):
            window.compute("b", lambda: None, needs=("r",))
        with pytest.raises(CommError, match="costs of z, which the window does not have; it has a"):
            window.costs({"z": 1.0})
        with pytest.raises(CommError, match="rounds is 0"):
            window.measure(0)
        window.collective("r", lambda: backend.all_reduce(torch.ones(1)))
        window.costs({"a": 1.0, "r": 2.0}, slowdown=0.5)
        with pytest.raises(CommError, match="r returned NoneType; start the collective with async_op"):
            window.run(window.plan())
