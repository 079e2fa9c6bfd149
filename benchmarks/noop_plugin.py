"""Plug-ins that override every hook and change nothing, to see what being asked costs."""

from collections.abc import Sequence

from sagellm.core.hooks import (
    CommDecision,
    CommOp,
    CommRequest,
    EvictionNotice,
    Plugin,
    PrefixMatch,
    PrefixQuery,
    PrefixRelease,
    PrefixUpdate,
    RequestId,
    RequestMetadata,
    ScheduleDecision,
    StepResult,
    StepView,
    VictimRequest,
)


class NoOp(Plugin):
    """Every decision is left to the engine."""

    def select_victims(self, request: VictimRequest) -> Sequence[int]:
        return ()

    def on_evicted(self, notice: EvictionNotice) -> None:
        pass

    def lookup_prefix(self, query: PrefixQuery) -> None:
        return None

    def on_prefix_matched(self, match: PrefixMatch) -> None:
        pass

    def on_prefix_stored(self, update: PrefixUpdate) -> None:
        pass

    def on_prefix_released(self, release: PrefixRelease) -> None:
        pass

    def admit(self, request: RequestMetadata) -> bool:
        return True

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        return None

    def on_step_end(self, result: StepResult) -> None:
        pass

    def on_request_end(self, request_id: RequestId) -> None:
        pass

    def comm_decide(self, request: CommRequest) -> CommDecision | None:
        return None

    def comm_begin(self, op: CommOp) -> None:
        pass

    def comm_end(self, op: CommOp, token: object) -> None:
        pass


class LastBackend(Plugin):
    """Decides each sort of collective, as the engine would have done with a backend of its own.

    Args:
        pieces, fused: as in `CommDecision`.
    """

    def __init__(self, pieces: int = 1, fused: bool = True) -> None:
        self.pieces, self.fused = pieces, fused

    def comm_decide(self, request: CommRequest) -> CommDecision:
        return CommDecision(request.backends[-1], self.pieces, self.fused)


class EngineOrder(NoOp):
    """Decides every step, as the engine would have done."""

    def schedule(self, view: StepView) -> ScheduleDecision:
        return ScheduleDecision()
