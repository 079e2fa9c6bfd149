"""Copies of the prefix indexes of engines, kept by their events, and a look at all of them for one prompt."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sagellm.comm_backend.control import new_key
from sagellm.control_plane.base import CachedPrompt, Candidates
from sagellm.control_plane.engine import ManagedEngine
from sagellm.control_plane.holders import Holders, blocks_before, marks, marks_within, num_held
from sagellm.control_plane.probe import ROUTES
from sagellm.core.errors import SageError
from sagellm.pd.bodies import Body
from sagellm.pd.engine import Engine
from sagellm.pd.group import Group
from sagellm.pd.tokens import PromptTokens, prefix_keys
from sagellm.prefix_reuse import HashedPrefixIndex

__all__ = ["CachedPrefixes", "FollowedIndex", "Tables"]

logger = logging.getLogger("sagellm.control")

EVENTS_S = 1.0  # events of what a request has computed are here so long after its end; engines send them each 0.1 s
AGAIN_S = 1.0  # until an engine is asked again that gives no events


class Tables(NamedTuple):
    """Which engines have which prefixes: as their events tell, and of requests that run there."""

    cached: Holders
    sent: Holders


class FollowedIndex(HashedPrefixIndex):
    """The cached prefixes of one engine, which the tables of all engines have too.

    Attributes:
        expected: mark of a prompt, beyond what was cached when it was sent -> requests with it that the engine has.
    """

    def __init__(self, block_size: int, engine: str, tables: Tables) -> None:
        super().__init__(block_size)
        self.expected: Counter[int] = Counter()
        self._engine, self._tables = engine, tables

    def store(self, hashes: Iterable[int]) -> None:
        hashes = list(hashes)
        super().store(hashes)
        self._tables.cached.add(self._engine, hashes)

    def remove(self, hashes: Iterable[int]) -> None:
        hashes = list(hashes)
        super().remove(hashes)
        self._tables.cached.drop(self._engine, hashes)

    def clear(self) -> None:
        self._tables.cached.drop(self._engine, self)
        super().clear()

    def expect(self, marks: Sequence[int]) -> None:
        """A request with these marks goes to the engine; until `settle`."""
        self.expected.update(marks)
        self._tables.sent.add(self._engine, marks)

    def settle(self, marks: Sequence[int]) -> None:
        """The request has ended, and its events are here."""
        self.expected.subtract(marks)
        gone = [each for each in marks if self.expected[each] <= 0]
        for each in gone:
            del self.expected[each]
        self._tables.sent.drop(self._engine, gone)

    def forget(self) -> None:
        """Nothing is known of the engine any more."""
        self._tables.sent.drop(self._engine, self.expected)
        self.expected.clear()
        self.clear()


class CachedPrefixes:
    """Follows the prefix caches of engines as a prefill/decode group does. Everything runs on one event loop.

    Args:
        on_change: called with the name of an engine from when on its events decide.

    Attributes:
        key: for engines that the manager starts.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self.key = new_key()
        self.tables: dict[int, Tables] = {}  # by tokens of a block
        self._on_change = on_change
        self._groups: dict[bytes, Group] = {}  # by key
        self._tasks: dict[str, tuple[str, asyncio.Task]] = {}  # engine -> its URL, and who follows it
        self._engines: dict[str, Engine] = {}
        self._tokens: dict[str, tuple[Path, PromptTokens]] = {}  # model -> folder and tokenizer
        self._loading = asyncio.Lock()

    def follow(self, engine: ManagedEngine) -> None:
        """The engine serves; follow it, if it tells. One that is followed already at this URL is left alone."""
        url, _ = self._tasks.get(engine.name, ("", None))
        if engine.kind.feed_key is None or url == engine.kind.url:
            return
        self.leave(engine.name)
        self._tasks[engine.name] = engine.kind.url, asyncio.create_task(self._follow(engine))

    def leave(self, name: str) -> None:
        """The engine has ended, or serves no more."""
        _, task = self._tasks.pop(name, ("", None))
        if task is not None:
            self._forget(name)
            task.cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for name in list(self._tasks):
            self.leave(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in self._groups.values():
            await group.close()

    def index(self, name: str) -> FollowedIndex | None:
        """Return what an engine has cached; None: it does not tell."""
        engine = self._engines.get(name)
        return None if engine is None else engine.mirror.index

    def status(self, name: str) -> dict[str, int]:
        """Return figures of one engine; none where it does not tell."""
        if (engine := self._engines.get(name)) is None:
            return {}
        index = engine.mirror.index
        return {"cached_blocks": len(index), "expected_prefixes": len(index.expected), "resyncs": engine.num_resyncs}

    async def prompt(self, path: str, body: Body) -> CachedPrompt | None:
        """Return what engines have cached of the first prompt of a request.

        Returns None if no engine tells, the model's tokenizer is not known here, or the path is not one of texts.
        """
        model = body.model if body.model is not None or len(self._tokens) != 1 else next(iter(self._tokens))
        if model not in self._tokens or not self._engines or path not in ROUTES[:2]:
            return None
        tokens = self._tokens[model][1]
        return await asyncio.to_thread(lambda: self.of(next(iter(tokens.of(path, body.raw) or []), [])))

    def of(self, tokens: list[int]) -> CachedPrompt:
        """Return what engines have cached of these tokens. From any thread."""
        return _Prompt(self, max(1, len(tokens)), {size: prefix_keys(tokens, size) for size in list(self.tables)})

    def take(self, name: str, engine: Engine) -> None:
        """Let the events of an engine decide from now on. `engine`: as a group knows it."""
        size = engine.facts.block_size
        index = FollowedIndex(size, name, self.tables.setdefault(size, Tables(Holders(), Holders())))
        index.store(engine.mirror.index)
        engine.mirror.index = index
        self._engines[name] = engine
        self._on_change(name)

    async def _follow(self, engine: ManagedEngine) -> None:
        name, url, key = engine.name, engine.kind.url, engine.kind.feed_key
        assert key is not None
        async with self._loading:
            await self._load(engine)
        group, trouble = await self._group(key), ""
        try:
            while True:
                try:
                    found = await group.join(url)
                    self.take(name, found)
                    await found.connection.wait_closed()
                    self._forget(name)
                except SageError as error:
                    if str(error) != trouble:
                        logger.warning("engine %s does not tell what it has cached: %s", name, error)
                    trouble = str(error)
                await asyncio.sleep(AGAIN_S)
        finally:
            await group.leave(url, "the manager has left it")

    async def _group(self, key: bytes) -> Group:
        if key not in self._groups:
            self._groups[key] = Group(key)
            await self._groups[key].start()
        return self._groups[key]

    async def _load(self, engine: ManagedEngine) -> None:
        """Load the tokenizer of an engine's model. Requests are routed by text until then, and after a failure."""
        try:
            folder = await asyncio.to_thread(engine.kind.model_folder)
            if folder is None or all(self._tokens.get(model, ("",))[0] == folder for model in engine.facts.models):
                return
            tokens = await asyncio.to_thread(PromptTokens, folder)
        except SageError as error:
            logger.warning("prompts for engine %s are routed by their text: %s", engine.name, error)
            return
        self._tokens |= dict.fromkeys(engine.facts.models, (folder, tokens))
        for name in self._engines:
            self._on_change(name)

    def _forget(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.mirror.index.forget()


class _Prompt(CachedPrompt):
    """`keys`: by tokens of a block, the hash of each prefix of whole blocks."""

    def __init__(self, prefixes: CachedPrefixes, num_tokens: int, keys: dict[int, list[int]]) -> None:
        self.num_tokens = num_tokens
        self._prefixes, self._keys = prefixes, keys
        self._marks = {size: marks(each) for size, each in keys.items()}
        self._found: dict[int, tuple[str, int]] = {}  # block size -> an engine with the most cached blocks, and these
        self._expected: dict[str, tuple[FollowedIndex, list[int]]] = {}

    def tokens_on(self, engine: str) -> int | None:
        index = self._prefixes.index(engine)
        return None if index is None else num_held(self._keys.get(index.block_size, ()), index) * index.block_size

    def longest(self, among: Candidates) -> tuple[int, str, bool]:
        best = 0, "", False
        for size, keys in self._keys.items():
            tables = self._prefixes.tables[size]
            num, engine = tables.cached.longest(keys, among)
            self._found[size] = engine, num
            if num * size > best[0]:
                best = num * size, engine, True
            first = marks_within(num)  # shorter ones that were sent change nothing, and not all of them are noted
            num, engine = tables.sent.longest(self._marks[size][first:], among)
            if engine and blocks_before(first + num) * size > best[0]:
                best = blocks_before(first + num) * size, engine, False
        return best

    def sent(self, engine: str) -> None:
        """The request goes to the engine."""
        index = self._prefixes.index(engine)
        if index is not None and engine not in self._expected:
            size = index.block_size
            found, most = self._found.get(size, ("", None))
            num = most if found == engine else num_held(self._keys.get(size, ()), index, most)
            own = self._marks.get(size, [])[marks_within(num) :]
            index.expect(own)
            self._expected[engine] = index, own

    def ended(self, engine: str) -> None:
        """The request has left the engine."""
        asyncio.get_running_loop().call_later(EVENTS_S, self.settle, engine)

    def settle(self, engine: str) -> None:
        """The events of the request are here."""
        index, own = self._expected.pop(engine, (None, []))
        if index is not None and self._prefixes.index(engine) is index:
            index.settle(own)
