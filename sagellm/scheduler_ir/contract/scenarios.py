"""The scenarios of the contract checks: each plays a queue on a strategy and reports the rules that it breaks."""

import gc
import inspect
import math
import random
from collections.abc import Callable
from contextlib import suppress

from sagellm.core.contract import Broke, Played, Report, Scenario
from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, RequestId, RequestView, StepResult, StepView
from sagellm.core.scheduling import NO_SERVICE, ServiceLevel
from sagellm.scheduler_ir.contract.judge import Judge
from sagellm.scheduler_ir.contract.watch import watched
from sagellm.scheduler_ir.simulation.base import EngineShape, FaultKind, LinearCosts, StrategyFault
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["SCENARIOS"]

Make = Callable[..., SchedulingStrategy]

NUM_REQUESTS = 24
NUM_CHURN = 400  # requests that come and go in each phase of the memory check
TENANTS, ADAPTERS = ("", "alpha", "beta"), ("", "", "small", "large")
BIG = 2**62


def random_requests(chance: random.Random, num_requests: int, per_s: float = 150.0) -> list[VirtualRequest]:
    """Short and long prompts of some tenants, some with targets; arrivals in bursts, several at the very same time."""
    requests = []
    now_s = 0.0
    for number in range(num_requests):
        if chance.random() < 0.7:
            now_s += chance.expovariate(per_s)
        service = NO_SERVICE
        if chance.random() < 0.7:
            ttft_s, tpot_s = chance.choice((math.inf, 0.05, 0.5)), chance.choice((math.inf, 0.02, 0.2))
            deadline_s = now_s + chance.choice((math.inf, 0.1, 5.0))
            service = ServiceLevel(chance.choice((-100, -1, 0, 7, 100)), chance.choice(TENANTS), deadline_s, ttft_s, tpot_s)
        prompt = chance.choice((1, 30, 60, 100, 400, 1200))
        output, spare = chance.randint(1, 40), chance.choice((0, 0, 100))
        request_id, adapter = RequestId(1000 + number), chance.choice(ADAPTERS)
        requests.append(VirtualRequest(request_id, now_s, prompt, output, service, adapter, output + spare))
    return requests


def play(
    judge: SchedulingStrategy | None, seed: int, num_blocks: int, report: Report, cancels: bool = False
) -> VirtualEngine:
    """Requests until all are complete. A bound of steps that even the smallest chunks do not reach stands for ever.

    Raises Broke: the strategy raised.
    """
    chance = random.Random(seed)
    requests = random_requests(chance, NUM_REQUESTS)
    prefill_s, decode_s = chance.choice((0.001, 0.01)), chance.choice((0.005, 0.03))
    engine = VirtualEngine(
        EngineShape(4, num_blocks, 512, 8, prefix_caching=False), LinearCosts((prefill_s, 1e-4, 1e-9), (decode_s, 2e-4, 0.0)),
        requests, judge,
    )  # fmt: skip
    bound = 20 * sum(each.prompt_tokens + each.num_to_generate for each in requests)
    num_calls = 0
    try:
        while num_calls < bound and engine.step():
            num_calls += 1
            if cancels and chance.random() < 0.1:
                engine.cancel(chance.choice(engine.in_flight or requests).request_id)
    except StrategyFault as fault:
        if fault.kind is FaultKind.RAISED:
            raise Broke from fault
        report("completes" if fault.kind is FaultKind.HELD else "answer", str(fault))
    if left := engine.unfinished:
        report("completes", f"{len(left)} requests, as {left[0].request_id}, are not complete after {num_calls} steps.")
    return engine


def workload(make: Make, seed: int, report: Report) -> Played:
    """Enough memory, little, and so little that requests are preempted all the time."""
    num_events, seen = 0, set()
    for num_blocks in (8000, 600, 330):
        judge = Judge(make(), report)
        with suppress(Broke):
            play(judge, seed, num_blocks, report)
            judge.seen.add("completes")
        num_events, seen = num_events + judge.num_events, seen | judge.seen
    return Played(num_events, seen)


def vanishing(make: Make, seed: int, report: Report) -> Played:
    """Requests are cancelled wherever they are, and those on the device are in no view."""
    judge = Judge(make(), report)
    with suppress(Broke):
        play(judge, seed, 400, report, cancels=True)
    return Played(judge.num_events, judge.seen)


def twice(make: Make, seed: int, report: Report) -> Played:
    """The same events on three instances; the third sees equal requests as objects that are never the same."""
    judges = []
    for renew in (False, False, True):
        judge = Judge(make(), lambda rule, message: None, renew)
        try:
            play(judge, seed, 400, lambda rule, message: None)
        except Broke:
            return Played(0, frozenset())  # another scenario reports it
        judges.append(judge)
    first = judges[0].decisions
    for rule, judge, why in (
        ("deterministic", judges[1], "in a second run"),
        ("identity", judges[2], "where the requests were equal, not identical"),
    ):
        for number, (one, other) in enumerate(zip(first, judge.decisions, strict=False)):
            if one != other:
                report(rule, f"step {number} was decided {_short(one)}, {why} {_short(other)}; let values alone decide.")
                return Played(0, {"deterministic", "identity"} if rule == "identity" else {"deterministic"})
    return Played(sum(judge.num_events for judge in judges), {"deterministic", "identity"})


def clocks(make: Make, seed: int, report: Report) -> Played:
    def read(name: str) -> None:
        report("reads_nothing", f"{name} was called; times come with views and results, random numbers from a seed.")

    strategy = _Watched(make, read)
    judge = Judge(strategy, lambda rule, message: None)
    with suppress(Broke):
        play(judge, seed, 400, lambda rule, message: None)
    return Played(judge.num_events, {"reads_nothing"})


class _Watched(SchedulingStrategy):
    """Reports what the calls of a strategy read, and those alone."""

    name = "watched"

    def __init__(self, make: Make, read: Callable[[str], None]) -> None:
        self._read = read
        with watched(read):
            self._strategy = make()

    def decide(self, view):
        with watched(self._read):
            return self._strategy.decide(view)

    def on_step_end(self, result):
        with watched(self._read):
            self._strategy.on_step_end(result)

    def on_request_end(self, request_id):
        with watched(self._read):
            self._strategy.on_request_end(request_id)


def extremes(make: Make, seed: int, report: Report) -> Played:
    """Views that no engine may ever give, and that must do no harm."""
    odd = ServiceLevel(-100, "", -math.inf, 1e-300, 1e-300)
    first = RequestView(RequestId(0), Phase.PREFILL, 1, 0, 0, 0, 0.0)
    huge = first._replace(request_id=RequestId(BIG), num_tokens=BIG, max_new_tokens=BIG, arrival_s=1e300, service=odd)
    run = first._replace(request_id=RequestId(BIG + 1), phase=Phase.DECODE, num_computed=1, first_token_s=0.0, last_token_s=0.0)
    tired = run._replace(
        request_id=RequestId(7), num_tokens=BIG, num_computed=BIG, num_generated=BIG, service=odd, first_token_s=math.inf
    )
    groups = (
        (), (first,), (run,), (first, huge), (huge, tired), (first, huge, run, tired),
        tuple(first._replace(request_id=RequestId(number)) for number in range(20)), (),
    )  # fmt: skip
    judge = Judge(make(), lambda rule, message: None if rule == "completes" else report(rule, message))  # the clock jumps
    with suppress(Broke):
        for step, requests in enumerate(groups * 2):
            for now_s, budget in ((0.0, 1), (1e300, BIG), (-5.0, 4096)):
                view = StepView(
                    step=step, phase=Phase.PREFILL, requests=requests, free_blocks=BIG * (step % 2), token_budget=budget,
                    max_batch_size=step % 3, num_in_flight=step % 2, now_s=now_s,
                )  # fmt: skip
                judge.decide(view)
                for phase in Phase:
                    computed = ((RequestId(99), BIG), (RequestId(0), 1))
                    for duration_s in (0.0, -1.0, 1e-300, 1e300, math.inf):
                        judge.on_step_end(StepResult(step, phase, 2, BIG + 1, now_s, duration_s, BIG, computed=computed))
        for request_id in (0, 99, BIG, 7, 7):  # also an unknown one, and one twice
            judge.on_request_end(RequestId(request_id))
        judge.decide(StepView(step=0, phase=Phase.DECODE, requests=(), free_blocks=0, token_budget=1))
    return Played(judge.num_events, judge.seen)


def building(make: Make, seed: int, report: Report) -> Played:
    """A name, and options that are refused in words where they make no sense."""
    strategy = make()
    if not (isinstance(name := getattr(strategy, "name", None), str) and name):
        report("builds", f"its name is {name!r}; give the class a text `name`.")
    if not isinstance(strategy, SchedulingStrategy):
        report("builds", f"{strategy!r} was built; extend sagellm.scheduler_ir.strategies.base.SchedulingStrategy.")
    parameters = inspect.signature(type(strategy).__init__).parameters.values()
    options = [item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in ("no_such_option", *options):
        value = object()  # nothing that any option could mean
        try:
            make(**{option: value})
        except PlanError:
            pass
        except TypeError as error:
            if option in options:
                report("options", f"option {option}={value!r} raised {error!r}; raise PlanError.")
        except (Exception, SystemExit) as error:
            report("options", f"option {option}={value!r} raised {error!r}; raise PlanError.")
        else:
            report("options", f"option {option}={value!r} was accepted; raise PlanError.")
    return Played(len(options) + 2, {"builds", "options"})


class _Id(int):
    """A request id that is counted as long as anybody holds it."""

    num_alive = 0

    def __new__(cls, value: int) -> "_Id":
        cls.num_alive += 1
        return super().__new__(cls, value)

    def __del__(self) -> None:
        type(self).num_alive -= 1


def churn(make: Make, seed: int, report: Report) -> Played:
    """Requests come and go; who is gone must not be kept."""
    strategy = make()
    gc.collect()
    before = _Id.num_alive
    try:
        for number in range(NUM_CHURN):
            name = RequestId(_Id(10_000 + number))
            service = ServiceLevel(0, f"tenant-{number % 5}")
            now_s = float(number)
            request = RequestView(name, Phase.PREFILL, 10, 0, 0, 1, now_s, "a" * (number % 2), service, 2)
            seen = dict(step=number, free_blocks=9, token_budget=512, max_batch_size=8, now_s=now_s)
            strategy.decide(StepView(phase=Phase.PREFILL, requests=(request,), **seen))
            strategy.on_step_end(StepResult(number, Phase.PREFILL, 1, 10, now_s, 0.01, computed=((name, 10),)))
            request = request._replace(phase=Phase.DECODE, num_computed=10, num_tokens=11, num_generated=1)
            request = request._replace(first_token_s=now_s, last_token_s=now_s)
            strategy.decide(StepView(phase=Phase.DECODE, requests=(request,), **seen))
            strategy.on_step_end(StepResult(number, Phase.DECODE, 1, 1, now_s, 0.01, 10, computed=((name, 1),)))
            strategy.on_request_end(name)
            del request, name
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"requests that come and go: {type(error).__name__}: {error}; it has to answer.")
        return Played(0, frozenset())
    gc.collect()
    if (num_held := _Id.num_alive - before) > NUM_CHURN // 4:
        report("forgets", f"{num_held} of {NUM_CHURN} requests that ended are held; let them go in on_request_end.")
    return Played(6 * NUM_CHURN, {"forgets"})


def _short(decision: tuple) -> str:
    text = repr(decision)
    return text if len(text) < 160 else text[:160] + "..."


SCENARIOS = {
    "building": Scenario(building),
    "extremes": Scenario(extremes),
    "workload": Scenario(workload, is_random=True),
    "vanishing": Scenario(vanishing, is_random=True),
    "twice": Scenario(twice, is_random=True),
    "clocks": Scenario(clocks),
    "churn": Scenario(churn),
}
