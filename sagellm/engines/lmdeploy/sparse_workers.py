"""News of a sparse policy on their way from tensor-parallel workers to the engine's process.

They come with the output of the step that they are of: weights that queries gave to blocks, lines of the record, and counts.
"""

from dataclasses import dataclass
from typing import Any

from lmdeploy.pytorch.strategies.ar import ARStrategyFactory
from lmdeploy.pytorch.strategies.ar.model_agent import ARExtraOutputs
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

__all__ = ["SparseFactory", "WorkerOutputs", "carry", "hand_over"]


@dataclass
class WorkerOutputs(ARExtraOutputs):
    """Extra outputs of a step. `sparse`: the `News` of worker 0; None where the model is in the engine's process."""

    sparse: Any = None


def carry(output: Any, news: Any) -> None:
    """Let a step's output, LMDeploy's `BatchedOutputs`, carry the `News` of a sparse policy."""
    if not isinstance(output.extra_outputs, WorkerOutputs):
        output.extra_outputs = WorkerOutputs()
    output.extra_outputs.sparse = news


def hand_over(running: list[Any], outputs: Any) -> None:
    """Leave the news of a step with its first sequence, where `SchedulerHooks.step_end` takes them."""
    running[0].sage_sparse = getattr(outputs.extra_outputs, "sparse", None)


class SparseFactory(ARStrategyFactory):
    """LMDeploy's strategies, with one for sequences that hands the news over."""

    def build_sequence_strategy(self) -> "SparseSequenceStrategy":
        return SparseSequenceStrategy()


class SparseSequenceStrategy(ARSequenceStrategy):
    """Hands the news of a step over before LMDeploy looks at its tokens."""

    def update_running(self, running: list[Any], batched_outputs: Any, is_decoding: bool) -> None:
        hand_over(running, batched_outputs)
        super().update_running(running, batched_outputs, is_decoding)
