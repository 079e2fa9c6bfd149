"""Guesses that tests of the engine make, how they ask it, and what it says of them."""

import asyncio
import random

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.tree import DraftTree
from sagellm.engines.base import SamplingParams
from tests.pool import settle
from tests.reference import make_prompts

KNOWING = "tests.engines.lmdeploy.guesses:Knowing"
KNOWING_TREES = KNOWING + "Trees"
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
# Together they want far more than 30 blocks of 16 tokens.
CROWD = make_prompts((40, 100, 33, 90, 64, 70, 20, 50, 130, 12))
WHOLE: list[tuple[int, ...]] = []  # texts with their right answers, which `Knowing` knows


class Knowing(SpeculativeStrategy):
    """Guesses what is right, with errors at random places: so each number of right guesses occurs.

    It keeps each text as it was told and raises where it is asked about another, which counts as a fault.
    """

    name = "knowing"

    def __init__(self, lookahead=4, wrong=0.3, seed=0):
        super().__init__(lookahead)
        self.wrong, self.draw = wrong, random.Random(seed)
        self.texts, self.begun, self.ended = {}, [], {}

    def begin(self, request_id, tokens):
        self.texts[request_id] = tokens.tolist()
        self.begun.append((request_id, len(tokens)))

    def accept(self, request_id, tokens):
        self.texts[request_id] += tokens

    def end(self, request_id):
        self.ended[request_id] = self.texts.pop(request_id, None)

    def propose(self, asks):
        return [self.one(ask) for ask in asks]

    def one(self, ask):
        assert ask.tokens.tolist() == self.texts[ask.request_id]
        size = len(ask.tokens)
        assert len(ask.blocks) * 16 >= size + ask.limit and len(set(ask.blocks.tolist())) == len(ask.blocks)
        text = next((each for each in WHOLE if each[:size] == tuple(self.texts[ask.request_id])), ())
        guesses = text[size : size + self.draw.randint(0, ask.limit)]
        return [(token + 1) % 300 if self.draw.random() < self.wrong else token for token in guesses]


class KnowingTrees(Knowing):
    """Trees: what `Knowing` guesses, and other tokens beside and behind it, in any order that a tree allows."""

    name = "knowing_trees"

    def __init__(self, lookahead=10, wrong=0.2, seed=0):
        super().__init__(lookahead, wrong, seed)

    def one(self, ask):
        chain = super().one(ask)
        if not chain:
            return chain
        # Children of each node, then an order in which parents come first.
        nodes = [(token, place - 1) for place, token in enumerate(chain)]
        while len(nodes) < ask.limit:
            nodes.append((self.draw.randrange(10, 250), self.draw.randrange(-1, len(nodes))))
        open_nodes, numbers, tokens, parents = [node for node, (_, up) in enumerate(nodes) if up < 0], {-1: -1}, [], []
        while open_nodes:
            node = open_nodes.pop(self.draw.randrange(len(open_nodes)))
            token, parent = nodes[node]
            numbers[node] = len(tokens)
            tokens.append(token)
            parents.append(numbers[parent])
            open_nodes += [other for other, (_, up) in enumerate(nodes) if up == node]
        return DraftTree(tokens, parents)


def tell(prompts, answers):
    WHOLE[:] = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]


def greedy(values):
    """LMDeploy's `GenerationConfig`, greedy unless `values` say otherwise."""
    from lmdeploy.messages import GenerationConfig

    return GenerationConfig(**dict(ignore_eos=True, do_sample=True, top_k=1) | values)


async def answer(engine, prompt, settings):
    """(tokens, log probabilities) of one request, on the engine's loop."""
    session, instance = next(engine._sessions), engine.engine.create_instance()
    tokens, logprobs = [], []
    try:
        async for output in instance.async_stream_infer(session, list(prompt), gen_config=settings):
            tokens += [int(token) for token in output.token_ids]
            logprobs += output.logprobs or []
            if getattr(asyncio.current_task(), "cancelling", int)():  # the engine's wait drops it where a token has just come
                raise asyncio.CancelledError
    finally:
        await instance.async_end(session)
    return tuple(tokens), logprobs


def ask(engine, prompts, every=({},), delays=None):
    """[(tokens, log probabilities)] of requests with these values of LMDeploy's `GenerationConfig`, greedy by default."""

    async def one(prompt, values, delay_s):
        await asyncio.sleep(delay_s)
        return await answer(engine, prompt, greedy(dict(max_new_tokens=NEW) | values))

    async def together():
        every_one = list(every) * len(prompts) if len(every) == 1 else every
        return await asyncio.gather(*map(one, prompts, every_one, delays or [0.0] * len(prompts)))

    found = engine._on_loop(together())
    settle(engine)
    return found


def tokens_of(found):
    return [tokens for tokens, _ in found]


def counts(engine, faults=0):
    report = engine.hooks.report()["speculation"]
    assert report["faults"] == faults, report["first_fault"]
    return report
