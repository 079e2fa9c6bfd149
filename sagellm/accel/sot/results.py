"""Results that the stages of skeleton-of-thought hand on.

Names and fields are those of SpecSoT. Speculation happens inside the engine's steps here, so the fields of a draft tree are
empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sagellm.core.running import Branches, Request

__all__ = [
    "BranchInfo", "Listener", "ParallelDecodeResult", "ParallelPrefillResult", "SchedulePlan", "ScheduleResult",
    "SkeletonDecodeResult", "SkeletonParseResult", "SkeletonPrefillResult", "SoTAnswer", "TaskData",
]  # fmt: skip

Mode = Literal["plan", "direct", "error"]


@dataclass(frozen=True)
class TaskData:
    """A point of a plan. `num_tokens`: tokens that the plan gives it."""

    branch_id: int
    title: str
    num_tokens: int


@dataclass(frozen=True)
class BranchInfo:
    """A branch to write. `prompt`: token ids behind those of the plan. `num_tokens`: its length, predicted."""

    branch_id: int
    title: str
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class _DraftTree:
    """Fields of SpecSoT for a draft tree between two stages. Always empty: the engine drafts and verifies within its steps."""

    draft_tokens: tuple[int, ...] = ()
    retrieve_indices: tuple[int, ...] = ()
    tree_mask: tuple[tuple[bool, ...], ...] = ()
    tree_position_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SkeletonPrefillResult(_DraftTree):
    """Stage 1. `max_kv_len`: tokens that the prompt and its plan may take. `request`: the plan's, which runs."""

    input_ids: tuple[int, ...] = ()
    input_len: int = 0
    max_kv_len: int = 0
    saved_eagle_kv: None = None  # the engine keeps all keys and values itself
    request: Request | None = None


@dataclass(frozen=True)
class SkeletonDecodeResult:
    """Stage 2. `skeleton_ids`: the plan's tokens; `decode_time`: seconds."""

    skeleton_ids: tuple[int, ...]
    skeleton_text: str
    decode_time: float


@dataclass(frozen=True)
class SkeletonParseResult:
    """Stage 3. `clean_branches`: what each branch is asked for, as text. `instruction_len`: tokens of the prompt."""

    mode: Mode
    tasks: tuple[TaskData, ...] = ()
    clean_branches: tuple[str, ...] = ()
    instruction_len: int = 0
    error_msg: str = ""


@dataclass(frozen=True)
class SchedulePlan:
    """`devices`: ids of the branches of each device, in the order in which they begin; `max_parallel`: at once on a device."""

    devices: tuple[tuple[int, ...], ...]
    max_parallel: int


@dataclass(frozen=True)
class ScheduleResult:
    """Stage 4. `my_branch_ids`: those of this device."""

    schedule_plan: SchedulePlan
    my_branch_ids: tuple[int, ...]
    branch_infos: tuple[BranchInfo, ...]


@dataclass(frozen=True)
class ParallelPrefillResult(_DraftTree):
    """Stage 5. `tips_indices`: the last common token; `branch_begins`, `branch_lengths`: where a branch's own prompt lies in
    `input_ids`, which has the common tokens first. `branches`: the requests, in the order of `branch_ids`."""

    input_ids: tuple[int, ...] = ()
    tips_indices: int = 0
    branch_begins: tuple[int, ...] = ()
    branch_lengths: tuple[int, ...] = ()
    branch_ids: tuple[int, ...] = ()
    branches: Branches | None = None


@dataclass(frozen=True)
class ParallelDecodeResult:
    """Stage 6. `branch_outputs`: tokens of each branch by its id, without one that ends the text. `finish_reasons`: stop or
    length, by the same id."""

    branch_outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)

    @property
    def stats(self) -> dict[str, Any]:
        return {"branches": len(self.branch_outputs), "branch_tokens": sum(map(len, self.branch_outputs.values()))}

    def add(self, branch_id: int, token_ids: tuple[int, ...], reason: str) -> None:
        """Add a branch that is written."""
        self.branch_outputs[branch_id], self.finish_reasons[branch_id] = token_ids, reason


@dataclass(frozen=True)
class SoTAnswer:
    """An answer.

    Attributes:
        mode: plan: written side by side; direct: the model wanted no plan; error: its plan was of no use. The last two are
            written as one text.
        token_ids, text: all points in order.
        tasks, branches: the points, and the tokens of each by its id.
        stats: seconds of the plan and of the rest, tokens, guesses that were drafted and accepted.
        finish_reasons: stop or length, by the id of a branch; that of an answer as one text by 0.
        error_msg: why there is no plan.
    """

    mode: Mode
    token_ids: tuple[int, ...]
    text: str
    tasks: tuple[TaskData, ...]
    branches: dict[int, tuple[int, ...]]
    stats: dict[str, Any]
    finish_reasons: dict[int, str]
    error_msg: str = ""


class Listener:
    """Hears of an answer while it is written, on the thread of its caller. A subclass takes what it needs.

    An answer as one text has one branch, 0, and no points.
    """

    def planned(self, tasks: Sequence[TaskData]) -> None:
        """The plan is read; empty for an answer as one text. Comes once, before any token."""

    def token(self, branch_id: int, token: int) -> None:
        """A branch has one more token."""

    def ended(self, branch_id: int, reason: str) -> None:
        """A branch has its last token. `reason`: stop or length."""
