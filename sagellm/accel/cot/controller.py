"""Chains of thought on a running engine: exact with the engine's guesses, or lossy with a judge of whole steps.

Source: chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2022). Steps that a judge accepts are an idea of
speculative reasoning (Pan et al., 2025).
"""

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sagellm.accel.cot.steps import CoTStep, find_split, make_steps
from sagellm.core.engines import TextEngine
from sagellm.core.errors import ConfigError
from sagellm.core.running import MAX_BRANCHES, Draft, Generation, SamplingParams

__all__ = ["Chain", "CoTAccelController", "CoTAnswer", "LikelyStep", "StepCase", "StepJudge", "last_number"]

TEMPERATURE = 0.7  # of several samples: that of the paper
MAX_BACKS = 16  # of a chain; after them the model writes on alone
KEPT_QUESTIONS, KEPT_CHAINS = 64, 8  # of which earlier chains are drafts
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str:
    """Return the last number of a chain, without commas; its last line if it has no number."""
    if found := NUMBER.findall(text):
        return found[-1].replace(",", "").rstrip(".")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class StepCase:
    """A drafted step that a judge decides about. `steps`: texts of the chain before it. `score`: returns the mean log
    probability of the draft's tokens under the model; it costs a pass over the whole text."""

    question: str
    steps: tuple[str, ...]
    draft: str
    score: Callable[[], float]


class StepJudge(ABC):
    """Decides whether a drafted step may stand where the model would perhaps write another one."""

    @abstractmethod
    def judge(self, case: StepCase) -> int:
        """Return how many steps to take back: 0 accepts the draft, 1 rejects it, 3 rejects it and the two before it."""


class LikelyStep(StepJudge):
    """Accepts a draft whose tokens have a mean log probability of at least `least` (nats)."""

    def __init__(self, least: float = -1.0) -> None:
        self.least = least

    def judge(self, case: StepCase) -> int:
        return int(case.score() < self.least)


@dataclass(frozen=True)
class Chain:
    """One chain of thought. `answer`: what it votes for; `taken_back`: steps that a judge took back, each time."""

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[CoTStep, ...]
    answer: str
    finish_reason: str
    taken_back: tuple[int, ...] = ()


@dataclass(frozen=True)
class CoTAnswer:
    """Chains to one question, and their vote.

    Attributes:
        answer: what most chains vote for; of equals the first.
        text, steps: of the first chain that votes for it.
        chains, votes: all chains; votes by answer.
        stats: `total_s`, seconds; `tokens`; `drafted` and `accepted` guesses; `acceptance`; `passes`, in which the tokens
            were computed; `latency_saved`, the share of passes that guesses saved. A pass with guesses takes longer.
    """

    answer: str
    text: str
    steps: tuple[CoTStep, ...]
    chains: tuple[Chain, ...]
    votes: dict[str, int]
    stats: dict[str, Any]


class CoTAccelController:
    """Answers questions by chains of thought.

    In exact mode, the default, the engine's speculative strategy guesses, and the engine verifies every token: a greedy chain
    is that of plain decoding. In semantic mode whole steps are drafted and a judge lets them pass: it is lossy.

    Args:
        engine: it runs. Its speculative strategy guesses; `chain` guesses from other chains.
        tokenizer: the model's.
        split: rule that splits a chain into steps: line, sentence, or a marker.
        accept: exact or semantic.
        judge: of semantic mode.
        draft_engine: engine of a smaller model with the same tokenizer, which drafts steps in semantic mode. None: steps of
            earlier chains to the same question are the drafts.
        vote: returns the answer of a chain's text.

    Raises:
        ConfigError: the rule or the mode is unknown, or a judge or a draft engine is missing or of no use.
    """

    def __init__(
        self, engine: TextEngine, tokenizer: Any, split: str = "line", accept: Literal["exact", "semantic"] = "exact",
        judge: StepJudge | None = None, draft_engine: TextEngine | None = None, vote: Callable[[str], str] = last_number,
    ) -> None:  # fmt: skip
        if accept not in ("exact", "semantic"):
            raise ConfigError(f"accept is {accept!r}; give exact, or semantic, which is lossy.")
        if accept == "exact" and (judge or draft_engine):
            raise ConfigError("judge and draft_engine belong to accept='semantic', which is lossy; leave them out.")
        if accept == "semantic" and judge is None:
            raise ConfigError("accept='semantic' needs a judge, for example LikelyStep(); its answers are lossy.")
        self.engine, self.tokenizer, self._vote = engine, tokenizer, vote
        self._split, self._judge, self._draft_engine = find_split(split), judge, draft_engine
        self._ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._earlier: dict[tuple[int, ...], list[tuple[CoTStep, ...]]] = {}  # prompt -> its latest chains

    def accelerate_cot(
        self, question: str | Sequence[dict[str, str]], samples: int = 1, max_new_tokens: int = 512,
        params: SamplingParams | None = None,
    ) -> CoTAnswer:  # fmt: skip
        """Answer a question by one chain, or by the vote of several.

        Args:
            question: text, or messages in the OpenAI form with examples of chains.
            samples: chains, 1 to 128. In exact mode they run side by side and share the prompt.
            max_new_tokens: of a chain.
            params: how tokens are sampled. Sample k has the seed `params.seed` + k. Default: greedy for one chain, temperature
                0.7 for several.

        Raises:
            ConfigError: the question is empty, or the samples are out of range or would all be equal.
            EngineError: the prompt is too long, or the engine gave up.
        """
        start_s = time.perf_counter()
        prompt, asked = self._prompt(question)
        params = params or SamplingParams(temperature=TEMPERATURE if samples > 1 else 0.0, seed=0)
        if type(samples) is not int or not 1 <= samples <= MAX_BRANCHES:
            raise ConfigError(f"samples is {samples!r}; give a whole number from 1 to {MAX_BRANCHES}.")
        if samples > 1 and params.temperature == 0:
            raise ConfigError(f"{samples} samples at temperature 0 are all equal; give a temperature, such as {TEMPERATURE}.")
        every = [
            replace(
                params, max_new_tokens=max_new_tokens, stop_token_ids=(*params.stop_token_ids, *self._ends), keep_drafts=True,
                seed=None if params.seed is None else params.seed + number,
            )
            for number in range(samples)
        ]  # fmt: skip
        is_exact = self._judge is None
        chains = self._exact(prompt, every) if is_exact else [self._semantic(asked, prompt, each) for each in every]
        return _voted(chains, time.perf_counter() - start_s)

    # ---- every token verified

    def _exact(self, prompt: Sequence[int], every: Sequence[SamplingParams]) -> list[Chain]:
        requests = [self.engine.start(prompt, every[0], keep=True)]  # kept, so that it can be forked although it has ended
        try:
            if len(every) > 1:
                requests += self.engine.fork(requests[0], [()] * (len(every) - 1), every[1:], num_tokens=0)
            found = [each.result() for each in requests]
        finally:
            for each in requests:
                each.cancel()
        return [
            self._chain(one, make_steps(one.token_ids, request.drafts, self._split, self.tokenizer))
            for one, request in zip(found, requests, strict=True)
        ]

    # ---- a judge lets steps pass

    def _semantic(self, question: str, prompt: tuple[int, ...], params: SamplingParams) -> Chain:
        steps: list[CoTStep] = []
        taken_back: list[int] = []
        reason, left = "length", params.max_new_tokens
        while left > 0:
            draft = () if len(taken_back) == MAX_BACKS else self._drafted(prompt, steps, params)[:left]
            num_back = self._judged(question, prompt, steps, draft) if draft else 1
            if draft and not num_back:
                steps.append(CoTStep(self._text(draft), draft, draft, (True,) * len(draft), is_judged=True))
            else:  # the model writes the step: the draft that was rejected would come again
                if num_back > 1:
                    taken_back.append(num_back - 1)
                    del steps[len(steps) - (num_back - 1) :]
                rejected = (draft,) if draft and num_back == 1 else ()
                left = params.max_new_tokens - sum(len(each.token_ids) for each in steps)
                steps += self._written(self.engine, [*prompt, *_tokens(steps)], replace(params, max_new_tokens=left), rejected)
            tokens = _tokens(steps)
            left = params.max_new_tokens - len(tokens)
            if tokens[-1] in params.stop_token_ids and not params.ignore_eos:
                reason, left = "stop", 0
        if prompt not in self._earlier and len(self._earlier) == KEPT_QUESTIONS:
            del self._earlier[next(iter(self._earlier))]
        self._earlier.setdefault(prompt, []).append(tuple(steps))
        del self._earlier[prompt][:-KEPT_CHAINS]
        return self._chain(Generation(tuple(_tokens(steps)), reason), tuple(steps), tuple(taken_back))

    def _drafted(self, prompt: tuple[int, ...], steps: Sequence[CoTStep], params: SamplingParams) -> tuple[int, ...]:
        """Return tokens that are a draft of the next step; empty if there is no draft."""
        if self._draft_engine is not None:
            greedy = SamplingParams(params.max_new_tokens, stop_token_ids=params.stop_token_ids)
            return tuple(_tokens(self._written(self._draft_engine, [*prompt, *_tokens(steps)], greedy)))
        last = steps[-1].token_ids if steps else ()
        for chain in reversed(self._earlier.get(prompt, ())):
            for before, each in zip((None, *chain), chain, strict=False):
                if last == (() if before is None else before.token_ids):
                    return each.token_ids
        return ()

    def _judged(self, question: str, prompt: Sequence[int], steps: Sequence[CoTStep], draft: Sequence[int]) -> int:
        def score() -> float:
            rows = self.engine.prompt_logits([*prompt, *_tokens(steps), *draft])[-len(draft) - 1 : -1].astype(np.float64)
            top = rows.max(axis=1, keepdims=True)
            logs = rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
            return float(logs[np.arange(len(draft)), list(draft)].mean())

        assert self._judge is not None
        found = self._judge.judge(StepCase(question, tuple(each.text for each in steps), self._text(draft), score))
        if not isinstance(found, int) or not 0 <= found <= len(steps) + 1:
            raise ConfigError(
                f"{type(self._judge).__name__} took {found!r} steps back; there are {len(steps) + 1} with the draft. "
                "Return 0 to accept it, or a number of steps up to that."
            )
        return int(found)

    def _written(
        self, engine: TextEngine, text: Sequence[int], params: SamplingParams, rejected: Sequence[Sequence[int]] = ()
    ) -> tuple[CoTStep, ...]:  # fmt: skip
        """The next step, as the model writes it. `text`: prompt and steps so far; `rejected`: a draft that a judge rejected."""
        request, tokens = engine.start(text, params), []
        try:
            for token in request:
                tokens.append(token)
                if self._split(self._text(tokens)):
                    break
        finally:
            request.cancel()
        drafts = [*(Draft(0, tuple(each)) for each in rejected), *request.drafts]
        return make_steps(tokens, drafts, self._split, self.tokenizer)[:1]

    # ---- parts

    def _prompt(self, question: str | Sequence[dict[str, str]]) -> tuple[tuple[int, ...], str]:
        """Token ids of the prompt, and the last message as text."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        asked = messages[-1].get("content", "") if messages else ""
        if not asked.strip():
            raise ConfigError("the question is empty; give some text, or messages that end with a question.")
        if self.tokenizer.chat_template is not None:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return tuple(self.tokenizer(text, add_special_tokens=False).input_ids), asked
        if not isinstance(question, str):
            raise ConfigError("messages need a model with a chat template, and this tokenizer has none; give text.")
        return tuple(self.tokenizer(question).input_ids), asked

    def _chain(self, found: Generation, steps: tuple[CoTStep, ...], taken_back: tuple[int, ...] = ()) -> Chain:
        text = self._text(found.token_ids)
        return Chain(text, found.token_ids, steps, self._vote(text), found.finish_reason, taken_back)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _tokens(steps: Sequence[CoTStep]) -> list[int]:
    return [token for each in steps for token in each.token_ids]


def _voted(chains: Sequence[Chain], total_s: float) -> CoTAnswer:
    votes = Counter(each.answer for each in chains)
    answer = votes.most_common(1)[0][0]  # of equals the first
    first = next(each for each in chains if each.answer == answer)
    steps = [step for each in chains for step in each.steps]
    tokens, drafted = sum(len(each.token_ids) for each in chains), sum(len(each.draft_tokens) for each in steps)
    accepted = sum(each.num_accepted for each in steps)
    stats = {
        "total_s": total_s, "tokens": tokens, "drafted": drafted, "accepted": accepted,
        "acceptance": accepted / max(1, drafted), "passes": tokens - accepted, "latency_saved": accepted / max(1, tokens),
    }  # fmt: skip
    return CoTAnswer(answer, first.text, first.steps, tuple(chains), dict(votes), stats)
