"""One strategy in the model agent: asks it before each decode step, and tells it after the step what was right."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from sagellm.accel.speculative.base import Ask, Draw, SpeculativeStrategy, StepOutcome, Verdict
from sagellm.accel.speculative.statistics import Statistics
from sagellm.accel.speculative.tree import Draft, DraftTree
from sagellm.engines.lmdeploy.speculative.exchange import SpecExtraInputs
from sagellm.engines.lmdeploy.speculative.guarded import GuardedStrategy
from sagellm.engines.lmdeploy.speculative.sharing import Sharing
from sagellm.engines.lmdeploy.speculative.text import FAR, Text
from sagellm.engines.lmdeploy.speculative.verify import sampling_rows, up_to_stop

__all__ = ["Speculator"]


NO_TREES: Mapping[int, Sequence[int]] = MappingProxyType({})


class _Late(NamedTuple):
    """A step of which the strategy is told later. `stops`: words that end each answer; None in the last step of a round."""

    row: list[int]
    stops: list[list[int]] | None
    num_before: int
    step_s: float


class Speculator:
    """Every method but `lookahead` and `report` runs on the thread of the agent's steps. A step without guesses must
    cost little here: while the strategy is quiet, a step is noted, and nothing is done by sequence.

    `is_verifying`: the step that runs now has guesses in it. `lookahead`: as many guesses there may be, now. `prompt_tokens`:
    None where a decode step of the device takes several tokens of a sequence, of each another number. Elsewhere a step with
    guesses goes as one of prompts whose beginnings are in the cache, and has so many tokens at most. `sharing`: of a worker
    among several, of which worker 0 guesses. `listeners`: by request, who hears of its guesses: (tokens before, guesses).
    `trees`: computes trees of guesses, see `CpuRunner`; None: they become chains. `takes_draws`: the strategy wants `Ask.draw`.
    """

    def __init__(self, strategy: SpeculativeStrategy, vocab_size: int) -> None:
        self.strategy = strategy
        self.statistics = Statistics()
        self.is_verifying = False
        self.prompt_tokens: int | None = None
        self.sharing: Sharing | None = None
        self.listeners: dict[int, Callable[[int, Sequence[int]], None]] = {}
        self.trees: Any = None
        self._guarded = GuardedStrategy(strategy, vocab_size)
        self.name, self.bind = self._guarded.name, self._guarded.bind
        self.takes_draws = getattr(strategy, "takes_draws", False) is True
        self._texts: dict[int, Text] = {}
        self._extra: SpecExtraInputs | None = None
        self._batch: list[tuple[int, Text]] = []  # requests of the step, but those of which it computes a part
        self._places: list[int] = []  # of these in the step
        self._request_ids: list[int] = []  # of all of them
        self._no_guesses: tuple[Verdict, ...] = ()
        self._tables: np.ndarray | None = None
        self._drafts: list[Draft] = []
        self._num_history: list[int] = []  # tokens of each sequence before the step
        self._is_decoding = self._has_floor = False
        self._draws: Callable[[int, int], Draw] | None = None
        self._quiet = 0  # so many further steps the strategy need not be told of at once
        self._late: list[_Late] = []  # those that it has not been told of, all of the same batch
        self._num_before = self._num_later = 0
        self._start_s = self._propose_s = 0.0

    def lookahead(self) -> int:
        return 0 if self._quiet else self._guarded.lookahead()

    def _lookahead(self, num_sequences: int) -> int:
        """So many guesses a sequence that the step stays one: LMDeploy cuts prompts that are longer into several."""
        most = self.lookahead()
        return most if self.prompt_tokens is None else max(0, min(most, self.prompt_tokens // num_sequences - 1))

    # ---- before the forward pass

    def extend(
        self, inputs: Any, extra: SpecExtraInputs, num_later: int, return_logits: bool, ended: Sequence[int] | None,
        draws: Callable[[int, int], Draw] | None = None,
    ) -> Any:  # fmt: skip
        """LMDeploy's `ModelInputs` of a step, with guesses behind the last token of its sequences.

        Args:
            num_later: further decode steps of this round, for each of which a sequence needs room for a token.
            return_logits: a request wants scores of the step, which are counted by sequence.
            ended: requests that have ended since the last step; a new one may have the name of one of them.
            draws: (sequence, count) -> how its next `count` tokens are drawn; None if that is unknown.
        """
        self._draws = draws
        if self.sharing is None:
            return self._guess(inputs, extra, num_later, return_logits, ended)
        if self.sharing.rank > 0:
            drafts = self.sharing.hear() if inputs.is_decoding else None
            self.is_verifying, self._drafts = drafts is not None, drafts or []
            return self._extended(inputs) if self.is_verifying else inputs
        extended = self._guess(inputs, extra, num_later, return_logits, ended)
        if inputs.is_decoding:
            self.sharing.tell(self._drafts if self.is_verifying else None)
        return extended

    def _guess(
        self, inputs: Any, extra: SpecExtraInputs, num_later: int, return_logits: bool, ended: Sequence[int] | None
    ) -> Any:
        self.is_verifying, self._is_decoding, self._num_later = False, inputs.is_decoding, num_later
        if extra is not self._extra:
            if ended:
                self._tell_late()
                for request in ended:
                    self._forget(request)
                self._look_again()
            self._take(extra, inputs.is_decoding)
        if not inputs.is_decoding:
            return inputs
        self._num_before = inputs.sum_kv_seqlen - len(self._batch)
        begin_s = self._start_s = time.perf_counter()
        if self._quiet:
            return inputs
        lookahead = self._lookahead(len(self._request_ids))
        if lookahead and not (return_logits or extra.is_counted or _has_images(inputs)):
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
        for _, text in self._batch if self._has_floor else ():
            if text.floor <= 0:  # LMDeploy has looked at it anew
                text.floor = FAR

    def _take_batch(self, extra: SpecExtraInputs, is_decoding: bool) -> None:
        self._tell_late()
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
        self._has_floor = any([text.floor < FAR for _, text in self._batch])
        self._look_again()

    def _proposed(self, lookahead: int, tables: torch.Tensor) -> dict[int, Draft]:
        """Guesses by request."""
        extra, asks = self._extra, []
        takes_trees = self.trees is not None and self.trees.takes_trees
        tree = None if takes_trees else False
        if self._tables is None:
            self._tables = tables.cpu().numpy().astype(np.int64)  # a copy: the engine owns its table
            self._tables.flags.writeable = False
        for number, (request, text) in enumerate(self._batch):
            held, table = extra.num_blocks[number], self._tables[number]
            if text.may_guess:
                room = held * extra.block_size - text.size - self._num_later
                limit = min(lookahead, text.left - 1, room, text.floor - 1)
                if extra.limits:
                    limit = min(limit, extra.limits.get(request, limit))
                if limit > 0:
                    draw = None if self._draws is None else self._draws(number, limit + 1)
                    asks.append(Ask(request, text.tokens, limit, table[:held], tree, draw))
        drafts = {}
        for ask, (guesses, why) in zip(asks, self._guarded.propose(asks) if asks else (), strict=True):
            is_cut = isinstance(guesses, DraftTree) and not takes_trees
            drafts[ask.request_id] = guesses.best_chain() if is_cut else guesses
            if why:
                self._blame(ask.request_id, why)
        return drafts

    def _extended(self, inputs: Any) -> Any:
        device = inputs.input_ids.device
        last = inputs.input_ids[0].tolist()
        tokens = [token for first, guesses in zip(last, self._drafts, strict=True) for token in (first, *guesses)]
        lengths = [len(guesses) + 1 for guesses in self._drafts]
        self._num_history = inputs.history_lengths.tolist()
        num_kv = [new + old for new, old in zip(lengths, self._num_history, strict=True)]
        if self.trees is not None:
            self.trees.plant(self._drafts if any([isinstance(draft, DraftTree) for draft in self._drafts]) else None)
        return replace(
            inputs,
            input_ids=torch.tensor([tokens], dtype=inputs.input_ids.dtype, device=device),
            seq_length=torch.tensor(lengths, device=device),
            is_decoding=self.prompt_tokens is None,
            max_q_seqlen=max(lengths),
            max_kv_seqlen=max(num_kv),
            sum_kv_seqlen=sum(num_kv),
        )

    # ---- after it

    async def sample(
        self, sampler: Any, logits: torch.Tensor, sampling_inputs: Any, inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        """Sample a step as LMDeploy does.

        Args:
            sampler: LMDeploy's own; `(logits, sampling_inputs, inputs)` -> (token of each row, log probabilities).
            logits: [rows, vocabulary].

        Returns:
            As `settle`.
        """
        sampled, logprobs = await sampler(logits, self.rows_of(sampling_inputs), inputs)
        return self.settle(sampled, logprobs, sampling_inputs)

    def rows_of(self, sampling_inputs: Any) -> Any:
        """LMDeploy's `SamplingInputs` of the step's sequences, for each of its rows."""
        return sampling_rows(sampling_inputs, self._drafts) if self.is_verifying else sampling_inputs

    def settle(self, sampled: torch.Tensor, logprobs: Any, sampling_inputs: Any) -> tuple[torch.Tensor, Any]:
        """Decide which tokens each sequence gets.

        Args:
            sampled: int64 [rows], the model's token of each row.
            logprobs: LMDeploy's log probabilities of each row, or None.
            sampling_inputs: of the sequences.

        Returns:
            Without guesses int64 [sequences] and log probabilities. With guesses int64 [sequences, longest], padded
            with -1, and log probabilities of each token that is not -1.
        """
        if not self.is_verifying:
            row = sampled.tolist()
            if self._quiet and self._is_decoding:
                self._note(row, sampling_inputs.stop_words)
                return sampled, logprobs
            self._tell_all([(token,) for token in row], sampling_inputs.stop_words)
            if self._is_decoding:
                self._judge(self._no_guesses, len(row))
            return sampled, logprobs
        drafts = self._drafts
        paths, kept = self._verified(sampled.tolist())
        for (request, text), place in zip(self._batch, self._places, strict=True) if self.listeners else ():
            if (hear := self.listeners.get(request)) is not None and drafts[place]:
                hear(text.size, _chain_of(drafts[place], paths[place]))
        if sampling_inputs.stop_words is not None:
            stops = sampling_inputs.stop_words.tolist()
            kept = [up_to_stop(tokens, words) for tokens, words in zip(kept, stops, strict=True)]
        self._move_keys(paths, kept)
        self._tell_all([tuple(tokens) for tokens in kept], sampling_inputs.stop_words)
        verdicts = tuple([
            Verdict(request, len(guesses), len(tokens) - 1)
            for request, guesses, tokens in zip(self._request_ids, drafts, kept, strict=True)
        ])  # fmt: skip
        trees = {
            request: path[: len(tokens) - 1]
            for request, draft, path, tokens in zip(self._request_ids, drafts, paths, kept, strict=True)
            if isinstance(draft, DraftTree)
        }
        self._judge(verdicts, len(sampled), trees)
        if logprobs is not None:
            chosen = torch.tensor(_rows_of(drafts, paths, kept), device=logprobs.vals.device)
            logprobs = replace(logprobs, vals=logprobs.vals[chosen], indices=logprobs.indices[chosen])
        longest = max(map(len, kept))
        table = [[*tokens, *[-1] * (longest - len(tokens))] for tokens in kept]
        return torch.tensor(table, dtype=sampled.dtype, device=sampled.device), logprobs

    def _verified(self, sampled: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Return for each sequence the guesses that stay, by number, and the tokens that it gets.

        Args:
            sampled: the model's tokens, d + 1 for a sequence of d guesses: behind its last token, and behind each guess.
        """
        paths, kept, row = [], [], 0
        for request, draft in zip(self._request_ids, self._drafts, strict=True):
            own = sampled[row : row + len(draft) + 1]
            path, why = self._guarded.verify(draft, own)
            if why:
                self._blame(request, why)
            tokens = list(draft)
            paths.append(path)
            kept.append([*[tokens[node] for node in path], own[path[-1] + 1 if path else 0]])
            row += len(own)
        return paths, kept

    def _move_keys(self, paths: list[list[int]], kept: list[list[int]]) -> None:
        """Keys and values of a tree's right guesses to where those of a chain would be."""
        moves: list[tuple[int, int]] = []
        size = self._extra.block_size
        for number, (draft, path, tokens) in enumerate(zip(self._drafts, paths, kept, strict=True)):
            if not isinstance(draft, DraftTree):
                continue
            table, first = self._tables[number], self._num_history[number] + 1
            for place, node in enumerate(path[: len(tokens) - 1]):
                if node != place:
                    pair = [int(table[at // size]) * size + at % size for at in (first + node, first + place)]
                    moves.append((pair[0], pair[1]))
        if moves:
            self.trees.move(moves)

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
                text.left = 0  # it has ended: its tokens in further steps of the round are dropped
        for request, why in self._guarded.accept(told):
            self._blame(request, why)

    def _judge(self, verdicts: tuple[Verdict, ...], num_rows: int, paths: Mapping[int, Sequence[int]] = NO_TREES) -> None:
        step_s = time.perf_counter() - self._start_s
        outcome = StepOutcome(verdicts, num_rows, self._num_before, step_s, self._propose_s, paths)
        self.statistics.add(outcome)
        self._tell_step(outcome)
        self._quiet = self._guarded.quiet()

    def _tell_step(self, outcome: StepOutcome) -> None:
        if why := self._guarded.tell("step_done", outcome):
            for request, _ in self._batch:
                self._blame(request, why)

    # ---- while the strategy is quiet

    def _note(self, row: list[int], stop_words: torch.Tensor | None) -> None:
        """A step of which it is told later; `row`: the token of each sequence."""
        stops = stop_words.tolist() if stop_words is not None and self._num_later else None
        step_s = time.perf_counter() - self._start_s
        self._late.append(_Late(row, stops, self._num_before, step_s))
        self.statistics.add_plain(len(row), step_s)
        self._quiet -= 1
        if not self._quiet:
            self._tell_late()

    def _tell_late(self) -> None:
        """All that it has not been told: it hears everything in the end, and in order."""
        late, self._late = self._late, []
        if not late:
            return
        columns = list(zip(*[step.row for step in late], strict=True))
        has_stops = any([step.stops is not None for step in late])
        told = []
        for (request, text), place in zip(self._batch, self._places, strict=True):
            if text.left <= 0:
                continue
            tokens = columns[place][: text.left]
            count = _until_stop(tokens, late, place) if has_stops else 0
            if count:
                tokens = tokens[:count]
            text.append(tokens)
            if count:
                text.left = 0  # as in `_tell_all`
            if text.may_guess:
                told.append((request, tokens))
        for request, why in self._guarded.accept(told):
            self._blame(request, why)
        for step in late:
            self._tell_step(StepOutcome(self._no_guesses, len(step.row), step.num_before, step.step_s, 0.0))
        self._quiet = self._guarded.quiet()

    def _look_again(self) -> None:
        """Something else was said: it may want to be asked now."""
        if self._quiet:
            self._quiet = self._guarded.quiet()

    # ---- requests

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
        """The strategy's `own` part may date from before it became quiet, since this is another thread."""
        return self.statistics.report() | self._guarded.report()


def _until_stop(tokens: Sequence[int], late: Sequence[_Late], place: int) -> int:
    """Tokens up to the one that ended the answer amidst a round; 0: none did."""
    for number, (token, step) in enumerate(zip(tokens, late, strict=False)):
        if step.stops is not None and token in step.stops[place]:
            return number + 1
    return 0


def _chain_of(draft: Draft, path: Sequence[int]) -> Sequence[int]:
    """Return the guesses of a list; of a tree those that were right, or the likeliest ones if none was."""
    if not isinstance(draft, DraftTree):
        return draft
    return [draft.tokens[node] for node in path] if path else draft.best_chain()


def _rows_of(drafts: Sequence[Draft], paths: list[list[int]], kept: list[list[int]]) -> list[int]:
    """The rows of the forward pass that gave the tokens which were kept."""
    rows, start = [], 0
    for draft, path, tokens in zip(drafts, paths, kept, strict=True):
        rows += [start, *[start + 1 + node for node in path[: len(tokens) - 1]]]
        start += len(draft) + 1
    return rows


def _has_images(inputs: Any) -> bool:
    return inputs.cross_length is not None or any(inputs.model_metas or ())
