"""One strategy in the model agent: asks it before each decode step, and tells it after the step what was right."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, Verdict
from sagellm.accel.speculative.statistics import Statistics
from sagellm.engines.lmdeploy.speculative.exchange import SpecExtraInputs
from sagellm.engines.lmdeploy.speculative.guarded import GuardedStrategy
from sagellm.engines.lmdeploy.speculative.text import Text
from sagellm.engines.lmdeploy.speculative.verify import accepted, sampling_rows, up_to_stop

__all__ = ["Speculator"]


class Speculator:
    """Every method runs on the thread of the agent's steps.

    `is_verifying`: the step that runs now has guesses in it. `lookahead`: as many guesses there may be, now.
    """

    def __init__(self, strategy: SpeculativeStrategy, vocab_size: int) -> None:
        self.strategy = strategy
        self.statistics = Statistics()
        self.is_verifying = False
        self._guarded = GuardedStrategy(strategy, vocab_size)
        self.name, self.lookahead, self.bind = self._guarded.name, self._guarded.lookahead, self._guarded.bind
        self._texts: dict[int, Text] = {}
        self._extra: SpecExtraInputs | None = None
        self._batch: list[int] = []  # request ids of the step
        self._drafts: list[list[int]] = []
        self._is_decoding = False
        self._num_before = 0
        self._start_s = self._propose_s = 0.0

    # ---- before the forward pass

    def extend(
        self, inputs: Any, extra: SpecExtraInputs, num_later: int, return_logits: bool, ended: Sequence[int] | None
    ) -> Any:
        """LMDeploy's `ModelInputs` of a step, with guesses behind the last token of its sequences.

        Args:
            num_later: further decode steps of this round, for each of which a sequence needs room for a token.
            return_logits: somebody wants the scores of the step, which are counted by sequence.
            ended: requests that have ended since the last step; a new one may have the name of one of them.
        """
        self.is_verifying, self._is_decoding = False, inputs.is_decoding
        if extra is not self._extra:
            for request in ended or ():
                self._forget(request)
            self._take(extra, inputs)
        if not inputs.is_decoding:
            return inputs
        begin_s = time.perf_counter()
        self._num_before = int(inputs.history_lengths.sum())
        has_images = inputs.cross_length is not None or any(inputs.model_metas or ())
        drafts = {} if return_logits or extra.is_counted or has_images else self._proposed(num_later)
        self._drafts = [drafts.get(request, []) for request in self._batch]
        self._start_s = time.perf_counter()
        self._propose_s = self._start_s - begin_s
        if not any(self._drafts):
            return inputs
        self.is_verifying = True
        return self._extended(inputs)

    def _take(self, extra: SpecExtraInputs, inputs: Any) -> None:
        """A step, or a round of decode steps, begins."""
        self._extra, self._batch = extra, extra.request_ids
        tables = inputs.block_offsets.cpu().numpy().astype(np.int64)  # a copy: the engine's own is nobody's to write in
        tables.flags.writeable = False
        for number, request in enumerate(self._batch):
            if extra.is_part[number]:
                continue  # the strategy hears of it when its whole prompt is computed
            known, before = extra.known[number], self._texts.get(request)
            if known is None and not inputs.is_decoding:
                known = before.tokens  # it lost its place, and found all but its last token in the prefix cache
            if known is not None:
                self._texts[request] = text = Text(known)
                text.is_blamed = before is not None and before.is_blamed
                text.may_guess = extra.may_guess[number] and not text.is_blamed
                self._tell("begin", request, text.tokens)
            text = self._texts[request]
            text.room, text.left = extra.rooms[number], extra.lefts[number]
            text.floor = extra.floors[number] or math.inf
            text.blocks = tables[number, : extra.num_blocks[number]]

    def _proposed(self, num_later: int) -> dict[int, list[int]]:
        """Guesses by request."""
        asks = []
        lookahead = self.lookahead()
        for request in self._batch:
            text = self._texts[request]
            limit = min(lookahead, text.left - 1, text.room - num_later, text.floor - 1)
            if text.may_guess and limit > 0:
                asks.append(Ask(request, text.tokens, int(limit), text.blocks))
        drafts = {}
        for ask, (guesses, why) in zip(asks, self._guarded.propose(asks) if asks else (), strict=True):
            drafts[ask.request_id] = guesses
            if why:
                self._blame(ask.request_id, why)
        return drafts

    def _extended(self, inputs: Any) -> Any:
        device = inputs.input_ids.device
        last = inputs.input_ids[0].tolist()
        tokens = [token for first, guesses in zip(last, self._drafts, strict=True) for token in (first, *guesses)]
        lengths = torch.tensor([len(guesses) + 1 for guesses in self._drafts])
        num_kv = lengths + inputs.history_lengths.cpu()
        return replace(
            inputs,
            input_ids=torch.tensor([tokens], dtype=inputs.input_ids.dtype, device=device),
            seq_length=lengths.to(device),
            max_q_seqlen=int(lengths.max()),
            max_kv_seqlen=int(num_kv.max()),
            sum_kv_seqlen=int(num_kv.sum()),
        )

    # ---- after it

    async def sample(
        self, sampler: Any, logits: torch.Tensor, sampling_inputs: Any, inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        """What LMDeploy's sampling would answer: tokens, int64 [sequences, longest], -1 where a sequence has got fewer; and
        their log probabilities, a row for each token that is no -1.

        Args:
            sampler: LMDeploy's own; `(logits, sampling_inputs, inputs)` -> (token of each row, log probabilities).
            logits: [rows, vocabulary].
        """
        drafts = self._drafts if self.is_verifying else [[]] * len(self._batch)
        rows = sampling_rows(sampling_inputs, drafts) if self.is_verifying else sampling_inputs
        sampled, logprobs = await sampler(logits, rows, inputs)
        kept = accepted(drafts, sampled.tolist())
        stops = [()] * len(kept) if sampling_inputs.stop_words is None else sampling_inputs.stop_words.tolist()
        kept = [up_to_stop(tokens, words) for tokens, words in zip(kept, stops, strict=True)]
        self._tell_all(drafts, kept, stops)
        if logprobs is not None and self.is_verifying:
            chosen = torch.tensor(_rows_of(drafts, kept), device=logprobs.vals.device)
            logprobs = replace(logprobs, vals=logprobs.vals[chosen], indices=logprobs.indices[chosen])
        longest = max(map(len, kept))
        table = [[*tokens, *[-1] * (longest - len(tokens))] for tokens in kept]
        return torch.tensor(table, dtype=sampled.dtype, device=sampled.device), logprobs

    def num_drafted(self) -> torch.Tensor:
        """int64 [sequences] of the step that was sampled last."""
        drafts = self._drafts if self.is_verifying else [()] * len(self._batch)
        return torch.tensor([len(guesses) for guesses in drafts])

    def _tell_all(self, drafts: Sequence[Sequence[int]], kept: list[list[int]], stops: Sequence[Sequence[int]]) -> None:
        for number, (request, tokens) in enumerate(zip(self._batch, kept, strict=True)):
            if self._extra.is_part[number] or self._texts[request].left <= 0:
                continue
            text = self._texts[request]
            text.append(tokens)
            self._tell("accept", request, tuple(tokens))
            if tokens[-1] in stops[number]:
                text.left = 0  # it has ended: what further steps of the round say of it is nobody's
        if self._is_decoding:
            self._judge(drafts, kept)

    def _judge(self, drafts: Sequence[Sequence[int]], kept: list[list[int]]) -> None:
        step_s = time.perf_counter() - self._start_s
        verdicts = tuple(
            Verdict(request, len(guesses), len(tokens) - 1)
            for request, guesses, tokens in zip(self._batch, drafts, kept, strict=True)
        )
        num_rows = sum(len(guesses) + 1 for guesses in drafts)
        outcome = StepOutcome(verdicts, num_rows, self._num_before, step_s, self._propose_s)
        self.statistics.add(outcome)
        if why := self._guarded.tell("step_done", outcome):
            for request in self._batch:
                self._blame(request, why)

    def _forget(self, request: int) -> None:
        text = self._texts.pop(request, None)
        why = self._guarded.tell("end", request)
        if why and not (text is not None and text.is_blamed):
            self._guarded.count(why, request)

    def _tell(self, method: str, request: int, tokens: Any) -> None:
        """Nothing is told of those that are not guessed at."""
        if self._texts[request].may_guess and (why := self._guarded.tell(method, request, tokens)):
            self._blame(request, why)

    def _blame(self, request: int, why: str) -> None:
        """The request goes on without guesses, to its end."""
        text = self._texts[request]
        if not text.is_blamed:
            text.is_blamed, text.may_guess = True, False
            self._guarded.count(why, request)

    def report(self) -> dict[str, Any]:
        return self.statistics.report() | self._guarded.report()


def _rows_of(drafts: Sequence[Sequence[int]], kept: list[list[int]]) -> list[int]:
    """The rows of the forward pass that gave the tokens which were kept."""
    rows, start = [], 0
    for guesses, tokens in zip(drafts, kept, strict=True):
        rows += range(start, start + len(tokens))
        start += len(guesses) + 1
    return rows
