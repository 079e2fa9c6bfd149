"""One strategy in the model agent: asks it before each decode step, and tells it after the step what was right."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, Verdict
from sagellm.accel.speculative.statistics import Statistics
from sagellm.engines.lmdeploy.speculative.exchange import SpecExtraInputs
from sagellm.engines.lmdeploy.speculative.text import Text
from sagellm.engines.lmdeploy.speculative.verify import accepted, sampling_rows

__all__ = ["Speculator"]

logger = logging.getLogger("sagellm")


class Speculator:
    """Every method runs on the thread of the agent's steps.

    `is_verifying`: the step that runs now has guesses in it. `faults`: request -> what the strategy did wrong.
    """

    def __init__(self, strategy: SpeculativeStrategy, vocab_size: int) -> None:
        self.strategy = strategy
        self.statistics = Statistics(strategy.lookahead)
        self.faults: dict[int, str] = {}
        self.is_verifying = False
        self._vocab_size = vocab_size
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
            self._take(extra, inputs.block_offsets)
        if not inputs.is_decoding:
            return inputs
        begin_s = time.perf_counter()
        self._num_before = int(inputs.history_lengths.sum())
        asks = [] if return_logits else self._asks(num_later)
        drafts = dict(zip([ask.request_id for ask in asks], self._propose(asks), strict=True)) if asks else {}
        self._drafts = [drafts.get(request, []) for request in self._batch]
        self._start_s = time.perf_counter()
        self._propose_s = self._start_s - begin_s
        if not any(self._drafts):
            return inputs
        self.is_verifying = True
        return self._extended(inputs)

    def _take(self, extra: SpecExtraInputs, block_offsets: torch.Tensor) -> None:
        """A step, or a round of decode steps, begins."""
        self._extra, self._batch = extra, extra.request_ids
        tables = block_offsets.cpu().numpy()
        for number, request in enumerate(self._batch):
            known = extra.known[number]
            if known is not None:
                self._texts[request] = text = Text(known)
                text.may_guess = extra.may_guess[number] and self._told("begin", request, text.tokens)
            text = self._texts[request]
            text.room, text.left, text.blocks = extra.rooms[number], extra.lefts[number], tables[number]

    def _asks(self, num_later: int) -> list[Ask]:
        asks = []
        for request in self._batch:
            text = self._texts[request]
            limit = min(self.strategy.lookahead, text.left - 1, text.room - num_later)
            if text.may_guess and limit > 0:
                asks.append(Ask(request, text.tokens, limit, text.blocks))
        return asks

    def _propose(self, asks: list[Ask]) -> list[list[int]]:
        try:
            answers = self.strategy.propose(asks)
            if len(answers) == len(asks):
                return [self._checked(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
            why = f"{len(answers)} proposals for {len(asks)} sequences"
        except Exception as error:
            why = _text_of(error)
        if len(asks) == 1:
            self._blame(asks[0].request_id, why)
            return [[]]
        return [self._propose([ask])[0] for ask in asks]  # one of them is at fault; the others keep their guesses

    def _checked(self, ask: Ask, answer: Sequence[int]) -> list[int]:
        guesses = [int(token) for token in answer]
        if len(guesses) > ask.limit:
            self._blame(ask.request_id, f"it proposed {len(guesses)} tokens; at most {ask.limit} were allowed")
        elif guesses and not 0 <= min(guesses) <= max(guesses) < self._vocab_size:
            odd = next(token for token in guesses if not 0 <= token < self._vocab_size)
            self._blame(ask.request_id, f"it proposed token {odd}; the vocabulary has 0 to {self._vocab_size - 1}")
        else:
            return guesses
        return []

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

    async def sample(self, sampler: Any, logits: torch.Tensor, sampling_inputs: Any, inputs: Any) -> tuple[torch.Tensor, Any]:
        """What LMDeploy's sampling would answer: tokens, int64 [sequences, longest], -1 where a sequence has got fewer; and
        their log probabilities, a row for each token that is no -1.

        Args:
            sampler: LMDeploy's own; `(logits, sampling_inputs, inputs)` -> (token of each row, log probabilities).
            logits: [rows, vocabulary].
        """
        if self.is_verifying:
            sampling_inputs = sampling_rows(sampling_inputs, self._drafts)
        sampled, logprobs = await sampler(logits, sampling_inputs, inputs)
        drafts = self._drafts if self.is_verifying else [[]] * len(self._batch)
        kept = accepted(drafts, sampled.tolist())
        if self._is_decoding:
            self._judge(drafts, kept)
        for request, tokens in zip(self._batch, kept, strict=True):
            text = self._texts[request]
            text.append(tokens)
            text.may_guess = text.may_guess and self._told("accept", request, tokens)
        if logprobs is not None and self.is_verifying:
            rows = torch.tensor(_rows_of(drafts, kept), device=logprobs.vals.device)
            logprobs = replace(logprobs, vals=logprobs.vals[rows], indices=logprobs.indices[rows])
        longest = max(map(len, kept))
        table = [[*tokens, *[-1] * (longest - len(tokens))] for tokens in kept]
        return torch.tensor(table, dtype=sampled.dtype, device=sampled.device), logprobs

    def num_drafted(self) -> torch.Tensor:
        """int64 [sequences] of the step that was sampled last."""
        drafts = self._drafts if self.is_verifying else [()] * len(self._batch)
        return torch.tensor([len(guesses) for guesses in drafts])

    def _judge(self, drafts: Sequence[Sequence[int]], kept: list[list[int]]) -> None:
        verdicts = tuple(
            Verdict(request, len(guesses), len(tokens) - 1)
            for request, guesses, tokens in zip(self._batch, drafts, kept, strict=True)
        )
        num_rows = sum(len(guesses) + 1 for guesses in drafts)
        step_s = time.perf_counter() - self._start_s
        outcome = StepOutcome(verdicts, num_rows, self._num_before, step_s, self._propose_s)
        self.statistics.add(outcome)
        try:
            self.strategy.step_done(outcome)
        except Exception as error:
            for request in self._batch:
                self._blame(request, f"step_done: {_text_of(error)}")

    def _forget(self, request: int) -> None:
        self._texts.pop(request, None)
        try:
            self.strategy.end(request)
        except Exception as error:
            self._blame(request, f"end: {_text_of(error)}")

    def _told(self, method: str, request: int, tokens: Any) -> bool:
        """Whether the strategy took it."""
        try:
            getattr(self.strategy, method)(request, tokens)
        except Exception as error:
            self._blame(request, f"{method}: {_text_of(error)}")
            return False
        return True

    def _blame(self, request: int, why: str) -> None:
        """The request goes on without guesses."""
        if request in self._texts:
            self._texts[request].may_guess = False
        if not self.faults:
            logger.error("strategy %s, request %s: %s; it goes on without guesses", self.strategy.name, request, why)
        self.faults.setdefault(request, why)

    def report(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name, **self.statistics.report(), "faults": len(self.faults),
            "first_fault": next(iter(self.faults.values()), ""), "own": self.strategy.report(),
        }  # fmt: skip


def _rows_of(drafts: Sequence[Sequence[int]], kept: list[list[int]]) -> list[int]:
    """The rows of the forward pass that gave the tokens which were kept."""
    rows, start = [], 0
    for guesses, tokens in zip(drafts, kept, strict=True):
        rows += range(start, start + len(tokens))
        start += len(guesses) + 1
    return rows


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
