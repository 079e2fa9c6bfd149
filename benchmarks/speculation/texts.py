"""Prompts whose answers are mostly in them, and prompts that lead guesses astray."""

import difflib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.models.real_text import RealText
from benchmarks.speculation.chain_model import CYCLE, FIRST, successors

__all__ = ["ChainTexts", "DemoTexts", "Texts"]

EDITED = 0.08  # of a text's tokens that stand otherwise in the prompt
COPIED = 0.5  # of an answer's tokens
RUN = 4  # tokens that count as copied together
CODE_TOKENS = 256  # of code to be continued
AT_ONCE = 32  # questions that are asked for copies

Answer = Callable[[list[list[int]]], list[list[int]]]


class ChainTexts:
    """Prompts for the chain model of so large a vocabulary. `ends`: tokens that end an answer; its texts have no end."""

    ends = ()

    def __init__(self, vocab_size: int) -> None:
        self._following = successors(vocab_size)

    def begin(self, work: str, answer: Answer) -> None:
        """Nothing to do: texts are many."""

    def prompts(self, work: str, num: int, seed: int) -> list[list[int]]:
        """Token ids of `num` prompts, by work:

        - *copy*: a text with a few tokens replaced, and its beginning. The answer is the text without the changes.
        - *random*: the tokens of the answer in random order, so that each latest token has been seen, with another one
          after it.
        """
        random = np.random.default_rng([seed, num])
        prompts = []
        for start in random.choice(np.arange(FIRST, len(self._following) - CYCLE), num, replace=False):
            text = [int(start)]
            while len(text) < CYCLE:
                text.append(int(self._following[text[-1]]))
            text = np.array(text)
            if work == "random":
                prompts.append([*random.permutation(text).tolist(), int(text[0])])
                continue
            edited = np.where(random.random(CYCLE) < EDITED, random.choice(text, CYCLE), text)
            prompts.append([*edited.tolist(), int(text[0])])
        return prompts


class DemoTexts:
    """Prompts for the demo model. No question is asked twice between two calls of `begin`. `ends`: tokens that end an answer.

    Args:
        model: folder of the demo model.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        from sagellm.demo_model.base import DemoRecipe
        from sagellm.demo_model.corpus import build_corpus

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.ends = (self._tokenizer.eos_token_id,)
        questions = [chat.user for chat in build_corpus(DemoRecipe()).chats]
        self._questions = [questions[place] for place in np.random.default_rng(11).permutation(len(questions)).tolist()]
        self._left: Iterator[list[int]] = iter(())
        self._copies: list[list[int]] = []
        self._num_asked = 0  # questions that were looked at for copies

    def begin(self, work: str, answer: Answer) -> None:
        """Contestants asked from now on remember nothing.

        Args:
            answer: prompts -> the model's answers, as token ids.
        """
        if work == "copy":
            self._left = itertools.chain(self._copies, self._copied(answer))
        else:
            self._left = iter([self._prompt(question) for question in self._questions])

    def prompts(self, work: str, num: int, seed: int) -> list[list[int]]:
        """Token ids of `num` prompts, by work:

        - *copy*: a question that the model was trained on, its answer, and the question again, answered alike. A share
          of `COPIED` or more of the answer's tokens is in the prompt, in runs.
        - *fresh*: such a question, once.
        - *random*: letters.

        Raises:
            ValueError: every question has been asked.
        """
        if work == "random":
            random = np.random.default_rng([seed, num])
            letters = [chr(code) for code in range(97, 123)] + [" ", "\n"]
            return [self._prompt("".join(random.choice(letters, 200))) for _ in range(num)]
        prompts = list(itertools.islice(self._left, num))
        if len(prompts) < num:
            raise ValueError("every question that the demo model knows was asked: measure fewer rounds or smaller batches")
        return prompts

    def _copied(self, answer: Answer) -> Iterator[list[int]]:
        """Further prompts of *copy*: half of all questions the model answers otherwise when they stand behind an answer."""
        while self._num_asked < len(self._questions):
            questions = self._questions[self._num_asked : self._num_asked + AT_ONCE]
            self._num_asked += len(questions)
            said = answer([self._prompt(question) for question in questions])
            texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]
            prompts = [self._prompt(question, text, question) for question, text in zip(questions, texts, strict=True)]
            again = answer(prompts)
            found = [
                prompt for prompt, first, second in zip(prompts, said, again, strict=True) if _share(first, second) >= COPIED
            ]
            self._copies += found
            yield from found

    def _prompt(self, *turns: str) -> list[int]:
        roles = itertools.cycle(("user", "assistant"))
        chat = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        return self._tokenizer.apply_chat_template(chat, add_generation_prompt=True)


class Texts:
    """Prompts for a model that reads English and code. `ends`: tokens that end an answer.

    Args:
        model: folder of the model.
    """

    def __init__(self, model: Path) -> None:
        self._text = RealText(model)
        self.ends = self._text.ends

    def begin(self, work: str, answer: Answer) -> None:
        """Nothing to do: texts are many."""

    def prompts(self, work: str, num: int, seed: int) -> list[list[int]]:
        """Token ids of `num` prompts of a work; *random* has the prompts of *chat*."""
        if work == "code":
            return [self._text.completion(CODE_TOKENS, seed, number) for number in range(num)]
        make = self._text.copy if work == "copy" else self._text.chat
        return [make(seed, number) for number in range(num)]


def _share(source: list[int], text: list[int]) -> float:
    """Return the tokens of `text` in runs that are in `source` in the same order."""
    matches = difflib.SequenceMatcher(None, source, text, autojunk=False).get_matching_blocks()
    return sum(match.size for match in matches if match.size >= RUN) / max(1, len(text))
