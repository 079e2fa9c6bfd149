"""The replay of a manager's record: the recorded views must give the recorded decisions on numbers of engines."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sagellm.control_plane.base import PoolView
from sagellm.control_plane.config import ScalingConfig
from sagellm.control_plane.registry import make_scaler
from sagellm.control_plane.scaling import OPEN, STEP, ScalingLoop
from sagellm.core.errors import TraceError
from sagellm.replay.record_lines import Checked, Difference, check_number, record_lines

__all__ = ["ScalingChecked", "verify_scaling"]


@dataclass(slots=True)
class ScalingChecked(Checked):
    """Result of a replay. `pools`: name -> decisions that were compared."""

    pools: dict[str, int] = field(default_factory=dict)

    @property
    def num_decisions(self) -> int:
        return sum(self.pools.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return Checked.to_dict(self) | {"pools": self.pools, "decisions": self.num_decisions}


def verify_scaling(path: Path) -> ScalingChecked:
    """Decide everything in a record again, from the recorded views, and list what differs.

    Raises:
        TraceError: the file cannot be read, is no record, or has no decision of a pool.
        SageError: the policy of the record cannot be built here.
    """
    report = ScalingChecked(str(path))
    loops: dict[str, ScalingLoop] = {}
    numbers: dict[str, int | None] = {}
    for number, line in record_lines(path, report):
        if line["event"] not in (OPEN, STEP):
            continue
        try:
            pool = line["pool"]
            if line["event"] == OPEN:
                config = ScalingConfig.model_validate(line["settings"])
                loops[pool] = ScalingLoop(make_scaler(config.policy, **config.options), config)
                numbers[pool] = check_number(None, number, line, report)
                continue
            if pool not in loops:
                raise TraceError(f"{path}, line {number}: pool {pool!r} decides before its line {OPEN}; give the whole record.")
            view = PoolView(**line["view"])
        except (KeyError, TypeError, ValidationError) as error:
            raise TraceError(f"{path}, line {number}: no line of a pool: {error!r}.") from None
        numbers[pool] = check_number(numbers[pool], number, line, report)
        again = loops[pool].step(view)
        for name, value in (("action", again.action), *again._asdict().items()):
            if line.get(name) != value:
                report.differences.append(Difference(number, STEP, name, line.get(name), value))
        report.pools[pool] = report.pools.get(pool, 0) + 1
    if not report.pools:
        raise TraceError(f"{path} has no decision of a pool; give a manager `record:` and `scaling:` in its file.")
    return report
