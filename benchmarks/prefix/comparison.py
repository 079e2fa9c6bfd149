"""Contestants side by side: all up at once, asked in turn, each figure a list with one value a round."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.contestants import interleave
from benchmarks.errors import BenchmarkError
from benchmarks.peers.process import ContestantProcess

WORKER = "benchmarks.prefix.worker"
EVICT_BLOCKS, EVICT_CALLS = 64, 4
LOOKUP_FIGURES = (("lookup_us", "cpu_ns"), ("lookup_wall_us", "wall_ns"), ("first_pass_us", "first_cpu_ns"))


class Entrant(NamedTuple):
    """`name` is that of the figures, `contestant` one of `contestants.CONTESTANTS`."""

    name: str
    python: str
    contestant: str
    num_sequences: int


class Plan(NamedTuple):
    """`rounds` of each `starts`, over `num_lookups` lookups. `evict`: also evict, after the lookups."""

    seed: int
    block_size: int
    num_lookups: int
    rounds: int
    starts: int
    evict: bool = True


def num_requests(entrants: Sequence[Entrant], plan: Plan) -> int:
    """How often `measure` calls `answered` if no contestant is refused."""
    each = 2 * plan.rounds + 2 + (plan.rounds + 1 if plan.evict else 0)
    return plan.starts * each * len(entrants)


def measure(entrants: Sequence[Entrant], plan: Plan, answered: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Figures of each entrant by name; of one whose answers are wrong only `about` and `refused`.

    Figures, each with one value a round: `lookup_us`, `lookup_wall_us` and `first_pass_us` (by part; the last with the caches
    as another contestant left them), `ns_per_matched_token`,
    `insert_ns_per_token`, `evict_ns_per_block`; with one value a start: `bytes_per_token`, `own_bytes_per_token`. Times
    are CPU time of the process unless they say wall. Tokens and bytes a token count what is cached, each token once.

    Raises:
        BenchmarkError: a contestant failed, or made another workload than the others.
    """
    figures = {entrant.name: {"about": {}, "refused": ""} for entrant in entrants}
    for number in range(plan.starts):
        with contextlib.ExitStack() as stack:
            processes = []
            for entrant in entrants:
                arguments = {
                    "contestant": entrant.contestant, "seed": plan.seed + number, "block_size": plan.block_size,
                    "num_sequences": entrant.num_sequences, "num_lookups": plan.num_lookups,
                }  # fmt: skip
                process = ContestantProcess(entrant.name, entrant.python, WORKER, arguments, answered)
                processes.append(stack.enter_context(process))
            for process in processes:
                figures[process.name]["about"] = process.about()
            _require_same_workload(entrants, figures)
            _one_start(processes, plan, figures)
    for own in figures.values():
        own["about"].pop("workload")
    return figures


def _require_same_workload(entrants: Sequence[Entrant], figures: dict[str, Any]) -> None:
    made: dict[int, tuple[str, str]] = {}
    for entrant in entrants:
        digest = figures[entrant.name]["about"]["workload"]
        name, first = made.setdefault(entrant.num_sequences, (entrant.name, digest))
        if digest != first:
            raise BenchmarkError(
                f"{entrant.name} has other lookups than {name}: their versions of NumPy draw differently; "
                "install the same one in both environments"
            )


def _one_start(processes: list[ContestantProcess], plan: Plan, figures: dict[str, Any]) -> None:
    for name, answers in interleave(processes, {"do": "insert", "rounds": plan.rounds}, plan.rounds).items():
        answers = [answer for answer in answers if answer["num_tokens"]]
        _extend(figures[name], "insert_ns_per_token", [a["cpu_ns"] / a["num_tokens"] for a in answers])
    for name, (answer,) in interleave(processes, {"do": "memory"}, 1).items():
        _extend(figures[name], "bytes_per_token", [answer["resident_bytes"] / answer["num_cached_tokens"]])
        if answer["own_bytes"] is not None:
            _extend(figures[name], "own_bytes_per_token", [answer["own_bytes"] / answer["num_cached_tokens"]])
    for name, (answer,) in interleave(processes, {"do": "check"}, 1).items():
        if answer["num_wrong"]:
            figures[name]["refused"] = f"{answer['num_wrong']} wrong answers: {answer['first']}"
    for own in figures.values():
        if own["refused"]:
            for key in own.keys() - {"about", "refused"}:
                del own[key]
    processes = [process for process in processes if not figures[process.name]["refused"]]
    for name, answers in interleave(processes, {"do": "lookup"}, plan.rounds).items():
        _add_lookups(figures[name], answers)
    if plan.evict:
        interleave(processes, {"do": "touch", "seed": plan.seed}, 1)
        request = {"do": "evict", "num_blocks": EVICT_BLOCKS, "calls": EVICT_CALLS}
        for name, answers in interleave(processes, request, plan.rounds).items():
            answers = [answer for answer in answers if answer and answer["num_blocks"]]
            _extend(figures[name], "evict_ns_per_block", [a["cpu_ns"] / a["num_blocks"] for a in answers])


def _add_lookups(own: dict[str, Any], answers: list[dict[str, dict[str, int]]]) -> None:
    for part in own["about"]["parts"]:
        rows = [answer[part] for answer in answers]
        for figure, field in LOOKUP_FIGURES:
            _extend(own.setdefault(figure, {}), part, [row[field] / row["num_lookups"] / 1e3 for row in rows])
    rows = [answer[own["about"]["parts"][0]] for answer in answers]
    _extend(own, "ns_per_matched_token", [row["cpu_ns"] / row["matched_tokens"] for row in rows])


def _extend(own: dict[str, Any], figure: str, values: list[float]) -> None:
    if values:  # a figure that a contestant has not is missing, not empty
        own.setdefault(figure, []).extend(values)
