"""Which branch is written where, and in which order."""

from collections.abc import Sequence

from sagellm.accel.sot.results import BranchInfo, SchedulePlan

__all__ = ["even", "longest_first"]


def even(branches: Sequence[BranchInfo], devices: int, max_parallel: int) -> SchedulePlan:
    """Deal branches out in their order, as many to each device."""
    ids = [each.branch_id for each in branches]
    return SchedulePlan(tuple(tuple(ids[device::devices]) for device in range(devices)), max_parallel)


def longest_first(branches: Sequence[BranchInfo], devices: int, max_parallel: int) -> SchedulePlan:
    """Give the longest branch that is left to the device with the fewest tokens (Graham, 1969)."""
    loads, chosen = [0] * devices, [list[int]() for _ in range(devices)]
    for each in sorted(branches, key=lambda branch: (-branch.num_tokens, branch.branch_id)):
        device = loads.index(min(loads))
        loads[device] += each.num_tokens
        chosen[device].append(each.branch_id)
    return SchedulePlan(tuple(map(tuple, chosen)), max_parallel)
