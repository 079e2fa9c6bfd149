"""Guesses for chains of thought: samples of one question, and earlier chains, guess each other while they run."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from sagellm.accel.speculative.base import Ask, Draw, SpeculativeStrategy, check_count, check_number

__all__ = ["ChainStrategy"]

DOUBT = 2.0  # weight of what shorter contexts say, for each token that has followed a context
MANY = 8  # sequences of a step from which on a guess must have the full `min_probability`
MIXED = 3  # contexts, the longest that are known
STEPS = 10  # of probabilities, whose guesses are judged together
PRIOR, PRIOR_WEIGHT = 0.8, 3.0  # right guesses, of those that are expected, until that many were judged
PROMPT_TOKENS = 2048  # of a prompt, its last
CLAIM = 0.5  # within a step of probabilities
KEPT = 0.995  # of what is known, with each guess that is judged
SURE, FADES = 0.99, 0.5  # of a token, beside the only number of it; by the distance of the numbers
RETRY = 0.98  # of what is known, with each guess that is not tried: without that it would never be tried again


class _Table:
    """Counts of tokens behind contexts of 1 to `order` tokens. Where one token has followed once, it stands alone.

    `drawn`: by hash of a whole text, and of the way to draw, the numbers of draws in order, each with its token."""

    def __init__(self, order: int) -> None:
        self._order = order
        self.after: dict[int, int | dict[int, int]] = {}
        self.drawn: dict[int, list[tuple[float, int]]] = {}
        self.num_tokens = self.num_users = 0

    def learn(self, text: Sequence[int], start: int) -> None:
        """Count the tokens from `start` on."""
        self.num_tokens += len(text) - start
        after = self.after
        for place in range(start, len(text)):
            token = text[place]
            for first in range(max(0, place - self._order), place):
                context = hash(tuple(text[first:place]))
                known = after.get(context)
                if known is None:
                    after[context] = token
                elif type(known) is int:
                    after[context] = {known: 2} if known == token else {known: 1, token: 1}
                else:
                    known[token] = known.get(token, 0) + 1


class _Text:
    """A request.

    Attributes:
        tokens: all so far.
        prompt: hash of its prompt.
        whole: hash of all its tokens.
        guesses: the latest, each with what it is judged by.
        draw: that of the latest ask.
    """

    __slots__ = ("draw", "guesses", "prompt", "tokens", "whole")

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt, self.whole = tokens, prompt, prompt
        self.guesses: list[tuple[int, int]] = []
        self.draw: Draw | None = None


class ChainStrategy(SpeculativeStrategy):
    """Contexts of 1 to `order` tokens are counted in the prompt, and in all answers, also in those that run. Requests with
    equal prompts share the counts. The guess is the token with the highest probability: that of the longest context that is
    known, mixed with those of the next two shorter ones.

    Behind a whole text where tokens were drawn before, the guess is the token of the draw with the nearest number. An equal
    number draws that token again, and so does a number between two of one token. So all of a sample is known that comes again
    with its seed.

    How often such guesses were right corrects the probability: they are judged by length of the context and probability.
    Guesses end where all of them are right with less than `min_probability`. Below eight sequences in a step less is enough,
    in proportion, since fewer share what a step costs without guesses.

    Memory: under 150 bytes for each context of a token and 300 for its draw, so under 1.2 kB a token with `order` 6. Both
    hold `max_tokens` tokens of answers at most, and drop the older half when they are full. The counts of a prompt hold its
    last 2,048 tokens, as long as a request with it runs.

    Args:
        lookahead: see `SpeculativeStrategy`.
        order: tokens of the longest context, 1 to 16.
        min_probability: 0 to 1.
        max_tokens: tokens of answers that are counted, 1000 to 2**24.

    Raises:
        SpeculationError: an option out of range.

    Source: mixing of contexts after prediction by partial matching (Cleary and Witten, 1984), with weights by the number of
    different followers (Witten and Bell, 1991).
    """

    name = "chain"
    joins = takes_draws = True

    def __init__(
        self, lookahead: int = 16, order: int = 6, min_probability: float = 0.6, max_tokens: int = 50_000
    ) -> None:
        super().__init__(lookahead)
        self.order = check_count(self.name, "order", order, 1, 16)
        self.min_probability = check_number(self.name, "min_probability", min_probability, 0, 1)
        self.max_tokens = check_count(self.name, "max_tokens", max_tokens, 1000, 2**24)
        self._new, self._old = _Table(self.order), _Table(self.order)
        self._prompts: dict[int, _Table] = {}  # by hash
        self._texts: dict[int, _Text] = {}
        kinds = range((self.order + 1) * STEPS)
        self._judged = [PRIOR_WEIGHT for _ in kinds]
        self._right = [_prior(kind) for kind in kinds]

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        least = self.min_probability * min(1.0, len(asks) / MANY)
        answers = []
        for ask in asks:
            text, tail = self._texts.get(ask.request_id), ask.tokens[-self.order :].tolist()
            if text is None or len(text.tokens) != len(ask.tokens) or text.tokens[-self.order :] != tail:
                self.begin(ask.request_id, ask.tokens)
                text = self._texts[ask.request_id]
            text.draw = ask.draw
            text.guesses = self._guesses(text, tail, ask.limit, least)
            answers.append([token for token, _ in text.guesses])
        return answers

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        new, text = tokens.tolist(), self._texts.get(request_id)
        if text is None or text.tokens != new[: len(text.tokens)]:
            self.end(request_id)
            known = max(1, len(new) - 1)  # the last token is the first of the answer, where samples part
            key = hash(tuple(new[:known]))
            if key not in self._prompts:
                self._prompts[key] = _Table(self.order)
                self._prompts[key].learn(new[:known], max(0, known - PROMPT_TOKENS))
            self._prompts[key].num_users += 1
            text = self._texts[request_id] = _Text(new[:known], key)
        text.draw = None
        self._append(text, new[len(text.tokens) :])

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(request_id)
        if text is None:
            return
        for (guess, kind), token in zip(text.guesses, tokens, strict=False):
            self._judged[kind] = KEPT * self._judged[kind] + 1
            self._right[kind] = KEPT * self._right[kind] + (guess == token)
            if guess != token:
                break
        self._append(text, tokens)
        text.guesses, text.draw = [], None

    def end(self, request_id: int) -> None:
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        self._prompts[text.prompt].num_users -= 1
        if not self._prompts[text.prompt].num_users:
            del self._prompts[text.prompt]

    def report(self) -> dict[str, Any]:
        """`contexts` of `tokens` of answers, which are at most `max_tokens`; `prompts` of running requests."""
        return {
            "tokens": self._new.num_tokens + self._old.num_tokens, "contexts": len(self._new.after) + len(self._old.after),
            "prompts": len(self._prompts),
        }  # fmt: skip

    def _append(self, text: _Text, tokens: Sequence[int]) -> None:
        half, draw = self.max_tokens // 2, text.draw
        before = len(text.tokens)
        text.tokens += tokens
        start = max(before, len(text.tokens) - half)
        if self._new.num_tokens + len(text.tokens) - start > half:
            self._new, self._old = _Table(self.order), self._new
        self._new.learn(text.tokens, start)
        for place, token in enumerate(tokens):
            if draw is not None and place < len(draw.numbers) and before + place >= start:
                known = self._new.drawn.setdefault(hash((text.whole, draw.way)), [])
                at = bisect_left(known, (draw.numbers[place], token))
                if known[at : at + 1] != [(draw.numbers[place], token)]:
                    known.insert(at, (draw.numbers[place], token))
            text.whole = hash((text.whole, token))

    def _guesses(self, text: _Text, tail: list[int], limit: int, least: float) -> list[tuple[int, int]]:
        """Guesses behind the last tokens of a text, each with what it is judged by."""
        found: list[tuple[int, int]] = []
        chance, whole, prompt = 1.0, text.whole, self._prompts[text.prompt].after
        while len(found) < limit:
            token, claim, length = self._drawn(whole, text.draw, len(found)) or self._likeliest(prompt, tail)
            if not length:
                break
            kind = (length - 1) * STEPS + min(int(claim * STEPS), STEPS - 1)
            chance *= self._right[kind] / self._judged[kind]
            if chance < least:
                if not found:
                    self._judged[kind] = RETRY * self._judged[kind] + (1 - RETRY) * PRIOR_WEIGHT
                    self._right[kind] = RETRY * self._right[kind] + (1 - RETRY) * _prior(kind)
                break
            found.append((token, kind))
            tail = [*tail[-self.order + 1 :], token] if self.order > 1 else [token]
            whole = hash((whole, token))
        return found

    def _drawn(self, whole: int, draw: Draw | None, place: int) -> tuple[int, float, int] | None:
        """As `_likeliest`, from draws behind the same text, which counts as longer than any context; None without any."""
        if draw is None:
            return None
        key, number = hash((whole, draw.way)), draw.numbers[place]
        sides = []
        for known in (self._new.drawn.get(key, ()), self._old.drawn.get(key, ())):
            at = bisect_left(known, (number,))
            sides += [(abs(each - number), each < number, token) for each, token in known[max(0, at - 1) : at + 1]]
        if not sides:
            return None
        distance, is_below, token = min(sides)
        is_between = any([other == token and below != is_below for _, below, other in sides])
        return token, 1.0 if is_between or not distance else max(0.0, SURE - FADES * distance), self.order + 1

    def _likeliest(self, prompt: dict[int, int | dict[int, int]], tail: list[int]) -> tuple[int, float, int]:
        """The likeliest token behind the contexts that are known, its probability, and the length of the longest; 0 if none
        is known."""
        length, mixed = self._mixed(prompt, tail)
        if not length:
            return 0, 0.0, 0
        token = max(mixed, key=mixed.__getitem__)
        return token, mixed[token], length

    def _mixed(self, prompt: dict[int, int | dict[int, int]], tail: list[int]) -> tuple[int, dict[int, float]]:
        """Length of the longest context that is known, and probabilities of the next token."""
        new, old = self._new.after, self._old.after
        known = []
        for length in range(len(tail), 0, -1):
            context = hash(tuple(tail[-length:]))
            if context in new or context in prompt or context in old:
                known.append(context)
                if len(known) == MIXED:
                    break
        mixed = dict[int, float]()
        for context in reversed(known):
            counts: dict[int, int] = {}
            for found in (new.get(context), prompt.get(context), old.get(context)):
                if type(found) is int:
                    counts[found] = counts.get(found, 0) + 1
                elif found is not None:
                    for token, count in found.items():
                        counts[token] = counts.get(token, 0) + count
            weight = DOUBT * len(counts) if mixed else 0.0
            total = sum(counts.values()) + weight
            mixed = {token: chance * weight / total for token, chance in mixed.items()}
            for token, count in counts.items():
                mixed[token] = mixed.get(token, 0.0) + count / total
        return (length + len(known) - 1 if known else 0), mixed


def _prior(kind: int) -> float:
    """Guesses of that kind that count as right before any is judged."""
    return PRIOR * PRIOR_WEIGHT * (kind % STEPS + CLAIM) / STEPS
