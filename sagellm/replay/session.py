"""All policies at all capacities: rows in the order asked for, each with its regret."""

from collections.abc import Callable, Mapping, Sequence

from sagellm.core.errors import CapacityError
from sagellm.core.hooks import Tier
from sagellm.replay.base import Trace
from sagellm.replay.policies import BELADY, Contestant, find_contestant
from sagellm.replay.run import Outcome, ReplayOptions, Row, failed_row, make_row, run, run_tiers

Report = Callable[[str, float], None]  # what is running, share of the whole that is done


def replay(
    trace: Trace, contestants: Sequence[Contestant], capacities: Sequence[int], options: ReplayOptions, *,
    with_bound: bool = True, report: Report | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each policy and capacity; Belady's choice runs once a capacity, unless `with_bound` is off.

    A run that has too little room to go on has a row with the reason; the others go on.

    Raises:
        PolicyError, TraceError: as the replays.
        CapacityError: no run had room to go on.
    """
    names = [contestant.name for contestant in contestants]
    has_bound_row = BELADY in names
    num_runs = len(capacities) * (len(contestants) + (with_bound and not has_bound_row))
    num_done = 0

    def measured(contestant: Contestant, capacity: int) -> Outcome | CapacityError:
        nonlocal num_done

        def progress(num_requests: int) -> None:
            report(
                f"{contestant.name} at {capacity}", (num_done + num_requests / max(1, trace.num_requests)) / num_runs
            )

        try:
            outcome = run(trace, contestant, capacity, options, progress if report else None)
        except CapacityError as error:
            outcome = error
        num_done += 1
        if report:
            report(f"{contestant.name} at {capacity}", num_done / num_runs)
        return outcome

    bounds: dict[int, Outcome | CapacityError] = {}
    if with_bound or has_bound_row:
        best = find_contestant(BELADY, {}, reference=options.reference)
        bounds = {capacity: measured(best, capacity) for capacity in capacities}
    rows = []
    for contestant in contestants:
        for capacity in capacities:
            is_bound = contestant.name == BELADY
            outcome = bounds[capacity] if is_bound else measured(contestant, capacity)
            if isinstance(outcome, CapacityError):
                rows.append(failed_row(trace, contestant, capacity, options, str(outcome)))
                continue
            bound = bounds.get(capacity)
            rows.append(
                make_row(trace, contestant, capacity, options, outcome, bound if isinstance(bound, Outcome) else None)
            )
    if rows and all(row.error for row in rows):
        raise CapacityError(rows[0].error)
    return rows


def replay_tiers(
    trace: Trace, contestants: Sequence[Contestant], tiers: Mapping[Tier, int], options: ReplayOptions, *,
    report: Report | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each policy, over several tiers. Raises as `run_tiers`."""
    rows = []
    for number, contestant in enumerate(contestants):

        def progress(num_requests: int, number: int = number, name: str = contestant.name) -> None:
            report(f"{name} on {len(tiers)} tiers", (number + num_requests / trace.num_requests) / len(contestants))

        rows.append(run_tiers(trace, contestant, tiers, options, progress if report else None))
    return rows
