"""Send a request to where its prefix already is.

Engines of this project tell what they have cached. For all others the router remembers the prompts that it sent there, by
their text. Source of the latter: the approximation of SGLang's router, which keeps a tree of recent prompts for each engine.
Here one table of prefix hashes serves all engines, so a choice among thousands of them takes no longer.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sagellm import _core
from sagellm.control_plane.base import Candidates, EngineView, RouteChoice, Router, RouteRequest
from sagellm.control_plane.holders import PLACES, Holders, blocks_before, marks, num_held
from sagellm.core.errors import PolicyError
from sagellm.core.options import option_checks

__all__ = ["Prefix"]

CACHED, SENT = "longest prefix cached", "longest prefix sent"  # reasons
BLOCK = 256  # bytes of a prompt, about the 64 tokens of a KV block
BLOCKS = (1, *(after - before for before, after in itertools.pairwise(PLACES)))  # by mark: since the one before
check_number, check_count = option_checks("router", PolicyError)


class Prefix(Router):
    """The engine with the longest prefix, unless it has far more to do than another one.

    Evictions of engines that do not tell are not seen: a prefix that they have dropped is looked for there until it is the
    oldest here.

    Args:
        min_share: a shorter prefix, as a share of the prompt, counts as none.
        slack: requests that the engine with the prefix may have more than the one with the least.
        capacity: blocks of 256 bytes that are remembered of each engine that does not tell.
    """

    name = "prefix"
    reads_caches = True

    def __init__(self, min_share: float = 0.25, slack: int = 8, capacity: int = 16384) -> None:
        self._min_share = check_number(self.name, "min_share", min_share, 0, 1)
        self._slack = check_count(self.name, "slack", slack)
        self._capacity = check_count(self.name, "capacity", capacity, 1, 1 << 24)
        self._holders = Holders()  # engines that were sent a prefix
        self._sent: dict[str, OrderedDict[int, int]] = {}  # engine -> hashes and the blocks of each, the oldest first
        self._num_blocks: dict[str, int] = {}  # engine -> blocks that are remembered of it

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        among = Candidates.of(engines)
        share, first, how, found, hashes = 0.0, "", SENT, "", []
        if (cached := request.cached) is not None:
            num, first, is_cached = cached.longest(among)
            share, found, how = num / cached.num_tokens, f"{num} of {cached.num_tokens} tokens", CACHED if is_cached else SENT
        if cached is None or self._holders:
            hashes = _hashes(request.prompt)
            num_marks, other = self._holders.longest(hashes, among)
            num = blocks_before(num_marks) * BLOCK
            if other and num > share * len(request.prompt):
                share, first, how, found = num / len(request.prompt), other, SENT, f"{num} of {len(request.prompt)} bytes"
        least = among.least_name()
        num_there = among.queue(least)[0]
        best, reason, detail = least, "least load", f"{num_there} requests there"
        if first and share >= self._min_share:
            detail = f"{found} {'are cached on' if how == CACHED else 'were sent to'} {first}"
            if (num := among.queue(first)[0]) <= num_there + self._slack:
                best, reason = first, how
            else:
                detail = f"{detail}, which has {num} requests"
        if cached is None or (reason != CACHED and cached.tokens_on(best) is None):
            self._note(best, hashes or _hashes(request.prompt))
        return RouteChoice(best, reason, detail)

    def forget(self, engine: str) -> None:
        self._holders.drop(engine, self._sent.pop(engine, ()))
        self._num_blocks.pop(engine, None)

    def _note(self, engine: str, hashes: list[int]) -> None:
        """Note a prompt, and forget the oldest blocks beyond the capacity."""
        sent, num = self._sent.setdefault(engine, OrderedDict()), self._num_blocks.get(engine, 0)
        # The end of a prompt comes first, so that it is forgotten before its beginning: then no mark is without those before.
        known = num_held(hashes, sent)
        for place in range(len(hashes) - 1, known - 1, -1):
            sent[hashes[place]] = BLOCKS[place]
        for each in reversed(hashes[:known]):
            sent.move_to_end(each)
        num += blocks_before(len(hashes)) - blocks_before(known)
        self._holders.add(engine, hashes[known:])
        while num > self._capacity:
            each, blocks = sent.popitem(last=False)
            num -= blocks
            self._holders.drop(engine, (each,))
        self._num_blocks[engine] = num


def _hashes(prompt: bytes) -> list[int]:
    """Return the hashes of a prompt that are remembered."""
    num_words = len(prompt) // BLOCK * BLOCK // 4
    return marks(_core.prefix_hashes(np.frombuffer(prompt, np.int32, num_words), BLOCK // 4).tolist())
