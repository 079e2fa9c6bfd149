"""Prompts that are computed in several steps, other requests' steps between them.

LMDeploy computes a prompt in one step, a long one in several forward passes that nothing comes between. To cut one, the
request enters its step with its next tokens alone. A token sampled after them is meaningless. It is dropped by sending
the request back to the queue before LMDeploy looks at it; full blocks are cached as any others.
"""

from typing import Any

from sagellm.engines.lmdeploy.pooling import is_pooled

__all__ = ["Chunks"]


class Chunks:
    """`refused`: (request id, why) of prompts of the step that comes next that were to be cut and are not."""

    def __init__(self, scheduler: Any) -> None:
        from lmdeploy.pytorch.messages import MessageStatus

        self._status = MessageStatus
        self._scheduler = scheduler
        self._on_the_way: dict[int, tuple[int, int]] = {}  # seq id -> its tokens in the step, and those left for later ones
        self.refused: list[tuple[int, str]] = []
        self.num_cut = 0

    def forget_refusals(self) -> None:
        self.refused = []

    def cut(self, seq: Any, limit: int, is_first: bool) -> None:
        """The request joins a step of prompts, with at most `limit` tokens if that can be."""
        if limit >= seq.num_token_ids:
            return
        why = "" if is_first else "it is not the first of its step"
        if why := why or self._obstacle(seq):
            self.refused.append((seq.session_id, f"its prompt is not cut: {why}"))
            return
        self._on_the_way[seq.seq_id] = limit, seq.num_token_ids - limit
        seq._num_token_ids = limit
        self.num_cut += 1

    def _obstacle(self, seq: Any) -> str:
        """Why the engine must compute this prompt in one step; empty if it need not."""
        if seq.sampling_param.response_format:
            return "its format is followed token by token, and the token behind a part would count"
        if seq.return_logits or seq.return_routed_experts:
            return "it wants the scores of every token, which are collected in one step"
        if is_pooled(seq):
            return "its embedding is pooled in one step"
        if not seq.history_multimodals.empty() or len(seq.history_embeddings):
            return "it has images"
        if type(seq).__name__ != "SchedulerSequenceDefault":
            return "the model generates in blocks of its own"
        if self._scheduler.is_ssm or self._scheduler.cache_config.window_size > 1:
            return "the model has states or a window, which move with each step"
        return ""

    def send_back(self, running: list[Any]) -> None:
        """A step has ended, and its results are about to be given out. Lengths are those of the step still."""
        if self._on_the_way:
            for seq in running:
                if seq.seq_id in self._on_the_way and seq.status is self._status.LOCKED:  # else it was cancelled meanwhile
                    seq.status = self._status.WAITING

    def settle(self, running: list[Any]) -> set[int]:
        """The results are given out. Returns the ids of the sequences of which only a part was computed."""
        if not self._on_the_way:
            return set()
        cut = set()
        for seq in running:
            num_done, num_left = self._on_the_way.pop(seq.seq_id, (0, 0))
            if num_left:
                cut.add(seq.seq_id)
                seq._num_history_ids += num_done
                seq._num_token_ids += num_left - num_done
        return cut

    def forget(self, seq: Any) -> None:
        """The request ends, or loses its blocks, perhaps while a part is on its way: nothing of that part counts."""
        _, num_left = self._on_the_way.pop(seq.seq_id, (0, 0))
        seq._num_token_ids += num_left
