"""One strategy in the model agent: asks it before each decode step, and tells it after the step what was right."""

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
from sagellm.engines.lmdeploy.speculative.text import FAR, Text
from sagellm.engines.lmdeploy.speculative.verify import accepted, sampling_rows, up_to_stop

__all__ = ["Speculator"]


class Speculator:
    """Every method runs on the thread of the agent's steps. What a step without guesses takes here is lost to all whom a silent
    strategy serves, so it does little for each sequence.

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
        self._batch: list[tuple[int, Text]] = []  # requests of the step, but those of which it computes a part
        self._places: list[int] = []  # of these in the step
        self._request_ids: list[int] = []  # of all of them
        self._no_guesses: tuple[Verdict, ...] = ()
        self._tables: np.ndarray | None = None
        self._drafts: list[list[int]] = []
        self._is_decoding = False
        self._num_before = self._num_later = 0
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
        self.is_verifying, self._is_decoding, self._num_later = False, inputs.is_decoding, num_later
        if extra is not self._extra:
            for request in ended or ():
                self._forget(request)
            self._take(extra, inputs.is_decoding)
        if not inputs.is_decoding:
            return inputs
        begin_s = time.perf_counter()
        self._num_before = inputs.sum_kv_seqlen - len(self._batch)
        if (lookahead := self.lookahead()) and not (return_logits or extra.is_counted or _has_images(inputs)):
            drafts = self._proposed(lookahead, inputs.block_offsets)
            self.is_verifying = any(drafts.values())
        self._start_s = time.perf_counter()
        self._propose_s = self._start_s - begin_s
        if not self.is_verifying:
            return inputs
        self._drafts = [drafts.get(request, []) for request in self._request_ids]
        return self._extended(inputs)

    def _take(self, extra: SpecExtraInputs, is_decoding: bool) -> None:
        """A step, or a round of decode steps, begins."""
        self._extra, self._tables = extra, None
        if extra.news or not is_decoding or extra.request_ids != self._request_ids:
            self._take_batch(extra, is_decoding)
        for _, text in self._batch:
            if text.floor <= 0:  # LMDeploy has looked at it anew
                text.floor = FAR

    def _take_batch(self, extra: SpecExtraInputs, is_decoding: bool) -> None:
        self._request_ids, self._batch, self._places = extra.request_ids, [], []
        for number, request in enumerate(extra.request_ids):
            news = extra.news.get(number)
            if news is not None and news.known is None:
                continue  # the strategy hears of it when its whole prompt is computed
            text = self._texts.get(request)
            if news is not None:
                is_blamed = text is not None and text.is_blamed
                text = self._texts[request] = Text(news.known, news.left, news.floor or FAR)
                text.is_blamed, text.may_guess = is_blamed, news.may_guess and not is_blamed
            # Without news in a prompt step: it lost its place, and kept or found again the blocks of all but its last token.
            if news is not None or not is_decoding:
                self._begin(request, text)
            self._batch.append((request, text))
            self._places.append(number)
        self._no_guesses = tuple([Verdict(request, 0, 0) for request in extra.request_ids])

    def _proposed(self, lookahead: int, tables: torch.Tensor) -> dict[int, list[int]]:
        """Guesses by request."""
        extra, asks = self._extra, []
        if self._tables is None:
            self._tables = tables.cpu().numpy().astype(np.int64)  # a copy: the engine's own is nobody's to write in
            self._tables.flags.writeable = False
        for (request, text), held, table in zip(self._batch, extra.num_blocks, self._tables, strict=True):
            if text.may_guess:
                room = held * extra.block_size - text.size - self._num_later
                limit = min(lookahead, text.left - 1, room, text.floor - 1)
                if limit > 0:
                    asks.append(Ask(request, text.tokens, limit, table[:held]))
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
        lengths = [len(guesses) + 1 for guesses in self._drafts]
        num_kv = [new + old for new, old in zip(lengths, inputs.history_lengths.tolist(), strict=True)]
        return replace(
            inputs,
            input_ids=torch.tensor([tokens], dtype=inputs.input_ids.dtype, device=device),
            seq_length=torch.tensor(lengths, device=device),
            max_q_seqlen=max(lengths),
            max_kv_seqlen=max(num_kv),
            sum_kv_seqlen=sum(num_kv),
        )

    # ---- after it

    async def sample(
        self, sampler: Any, logits: torch.Tensor, sampling_inputs: Any, inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        """What LMDeploy's sampling would answer, int64 [sequences] and log probabilities; of a step with guesses int64
        [sequences, longest], -1 where a sequence has got fewer, and log probabilities of each token that is no -1.

        Args:
            sampler: LMDeploy's own; `(logits, sampling_inputs, inputs)` -> (token of each row, log probabilities).
            logits: [rows, vocabulary].
        """
        if not self.is_verifying:
            sampled, logprobs = await sampler(logits, sampling_inputs, inputs)
            kept = [(token,) for token in sampled.tolist()]
            self._tell_all(kept, sampling_inputs.stop_words)
            if self._is_decoding:
                self._judge(self._no_guesses, len(kept))
            return sampled, logprobs
        drafts = self._drafts
        sampled, logprobs = await sampler(logits, sampling_rows(sampling_inputs, drafts), inputs)
        kept = accepted(drafts, sampled.tolist())
        if sampling_inputs.stop_words is not None:
            stops = sampling_inputs.stop_words.tolist()
            kept = [up_to_stop(tokens, words) for tokens, words in zip(kept, stops, strict=True)]
        self._tell_all([tuple(tokens) for tokens in kept], sampling_inputs.stop_words)
        verdicts = tuple([
            Verdict(request, len(guesses), len(tokens) - 1)
            for request, guesses, tokens in zip(self._request_ids, drafts, kept, strict=True)
        ])  # fmt: skip
        self._judge(verdicts, len(sampled))
        if logprobs is not None:
            chosen = torch.tensor(_rows_of(drafts, kept), device=logprobs.vals.device)
            logprobs = replace(logprobs, vals=logprobs.vals[chosen], indices=logprobs.indices[chosen])
        longest = max(map(len, kept))
        table = [[*tokens, *[-1] * (longest - len(tokens))] for tokens in kept]
        return torch.tensor(table, dtype=sampled.dtype, device=sampled.device), logprobs

    def num_drafted(self) -> torch.Tensor | None:
        """int64 [sequences] of the step that was sampled last; None if it had no guesses."""
        return torch.tensor([len(guesses) for guesses in self._drafts]) if self.is_verifying else None

    def _tell_all(self, kept: Sequence[tuple[int, ...]], stop_words: torch.Tensor | None) -> None:
        stops = stop_words.tolist() if stop_words is not None and self._num_later else None
        told = []
        for (request, text), place in zip(self._batch, self._places, strict=True):
            if text.left <= 0:
                continue
            tokens = kept[place]
            text.append(tokens)
            if text.may_guess:  # of others nothing is told
                told.append((request, tokens))
            if stops is not None and tokens[-1] in stops[place]:
                text.left = 0  # it has ended: what further steps of the round say of it is nobody's
        for request, why in self._guarded.accept(told):
            self._blame(request, why)

    def _judge(self, verdicts: tuple[Verdict, ...], num_rows: int) -> None:
        step_s = time.perf_counter() - self._start_s
        outcome = StepOutcome(verdicts, num_rows, self._num_before, step_s, self._propose_s)
        self.statistics.add(outcome)
        if why := self._guarded.tell("step_done", outcome):
            for request, _ in self._batch:
                self._blame(request, why)

    def _forget(self, request: int) -> None:
        text = self._texts.pop(request, None)
        why = self._guarded.tell("end", request)
        if why and not (text is not None and text.is_blamed):
            self._guarded.count(why, request)

    def _begin(self, request: int, text: Text) -> None:
        if text.may_guess and (why := self._guarded.tell("begin", request, text.tokens)):
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


def _has_images(inputs: Any) -> bool:
    return inputs.cross_length is not None or any(inputs.model_metas or ())
