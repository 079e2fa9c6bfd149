"""Prompts whose answers are mostly in them, and prompts that lead guesses astray."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speculation.chain_model import CYCLE, FIRST, successors

__all__ = ["chain_prompts", "demo_prompts"]

EDITED = 0.08  # of a text's tokens that stand otherwise in the prompt


def chain_prompts(work: str, batch: int, seed: int, vocab_size: int) -> list[list[int]]:
    """For the chain model, by work:

    - *copy*: a text of which a few tokens were replaced, and its beginning: the answer is the text without the changes;
    - *random*: the tokens of the answer in random order, so that each latest token has been seen, with another one after it.
    """
    random = np.random.default_rng([seed, batch])
    following = successors(vocab_size)
    prompts = []
    for start in random.choice(np.arange(FIRST, vocab_size - CYCLE), batch, replace=False):
        text = [int(start)]
        while len(text) < CYCLE:
            text.append(int(following[text[-1]]))
        text = np.array(text)
        if work == "random":
            prompts.append([*random.permutation(text).tolist(), int(text[0])])
            continue
        edited = np.where(random.random(CYCLE) < EDITED, random.choice(text, CYCLE), text)
        prompts.append([*edited.tolist(), int(text[0])])
    return prompts


def demo_prompts(work: str, batch: int, seed: int, model: Path, answer: Any) -> list[list[int]]:
    """For the demo model, by work:

    - *copy*: a question that it was trained on, its answer, and the question again;
    - *fresh*: such a question;
    - *random*: letters.

    Args:
        answer: prompts -> the model's answers, as token ids.
    """
    from transformers import AutoTokenizer

    from sagellm.demo_model.base import DemoRecipe
    from sagellm.demo_model.corpus import build_corpus

    random = np.random.default_rng([seed, batch])
    tokenizer = AutoTokenizer.from_pretrained(model)
    if work == "random":
        letters = [chr(code) for code in range(97, 123)] + [" ", "\n"]
        chats = [[{"role": "user", "content": "".join(random.choice(letters, 200))}] for _ in range(batch)]
        return [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    chats = build_corpus(DemoRecipe()).chats
    questions = [chats[int(place)].user for place in random.choice(len(chats), batch, replace=False)]
    firsts = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True) for each in firsts]
    if work == "fresh":
        return prompts
    said = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answer(prompts)]
    return [
        tokenizer.apply_chat_template([*first, {"role": "assistant", "content": text}, *first], add_generation_prompt=True)
        for first, text in zip(firsts, said, strict=True)
    ]
