"""A prefill and a decode engine in this process, as their proxy would use them."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import processes
from sagellm.comm_backend.control import new_key
from sagellm.comm_backend.group_messages import Connect
from sagellm.core.config import PDHooks
from tests.engines.lmdeploy.guesses import answer, greedy
from tests.pool import settle

NEW = 8
TRANSFERS = itertools.count(1 << 40)
NUMBERS = itertools.count(1)


def key_file(folder: Path) -> Path:
    file = folder / "key"
    if not file.exists():
        file.touch(0o600)
        file.write_bytes(new_key())
    return file


def hooks(role: str, key: Path, **values: Any) -> PDHooks:
    known = dict(role=role, engine_id=f"http://{role}:{next(NUMBERS)}", key_file=key, channel="shm", weights="w")
    return PDHooks(**known | values)


class Pair:
    """`start`: the fixture `start_engine`. `prefill`, `decode`: values of each engine's `PDHooks`; `config` of both."""

    def __init__(
        self, start: Callable, folder: Path, prefill: dict | None = None, decode: dict | None = None, connect: bool = True,
        decode_config: dict | None = None, prefill_config: dict | None = None, **config: Any,
    ) -> None:  # fmt: skip
        key = key_file(folder)
        self.of_prefill, self.of_decode = hooks("prefill", key, **prefill or {}), hooks("decode", key, **decode or {})
        self.prefill = start(pd=self.of_prefill, **config | (prefill_config or {}))
        self.decode = start(pd=self.of_decode, **config | (decode_config or {}))
        wait_until(lambda: self.prefill.hooks.pd._address and self.decode.hooks.pd._address)
        if connect:
            self.connect()

    def connect(self) -> None:
        message = Connect(engine_id=self.of_prefill.engine_id, address=self.prefill.hooks.pd._address)
        self.decode._on_loop(self.decode.hooks.pd._connect(None, message))

    def ask(
        self, prompts: Sequence[Sequence[int]], every: Sequence[dict] = ({},), *, to_prefill: bool = True,
        other: Sequence[Sequence[int]] | None = None,
    ) -> list[tuple[tuple[int, ...], list]]:  # fmt: skip
        """[(tokens, log probabilities)]: greedy unless `every` (values of LMDeploy's `GenerationConfig`) says otherwise.

        `to_prefill`: the prefill engine gets its copies; `other`: prompts that it gets in place of the right ones.
        """
        ways = list(every) * len(prompts) if len(every) == 1 else every
        numbers = [next(TRANSFERS) for _ in prompts]
        copies = []
        if to_prefill:
            copies = [
                asyncio.run_coroutine_threadsafe(one(self.prefill, prompt, way, number, self.of_decode.engine_id, True),
                                                 self.prefill._loop)
                for prompt, way, number in zip(other or prompts, ways, numbers, strict=True)
            ]  # fmt: skip
        found = self.decode._on_loop(self._answers(prompts, ways, numbers))
        for copy in copies:
            copy.result(60)
        for engine in (self.decode, self.prefill):
            settle(engine)
        return found

    async def _answers(self, prompts: Sequence, ways: Sequence, numbers: Sequence[int]) -> list:
        peer = self.of_prefill.engine_id
        asked = zip(prompts, ways, numbers, strict=True)
        return await asyncio.gather(*(one(self.decode, prompt, way, number, peer, False) for prompt, way, number in asked))

    def report(self, engine: str = "decode") -> dict[str, Any]:
        return getattr(self, engine).hooks.report()["pd"]


async def one(engine: Any, prompt: Sequence[int], values: dict, transfer: int, peer: str, is_copy: bool) -> tuple:
    """A request as the proxy sends it: its copy to the prefill engine, or itself to the decode engine."""
    from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol, MigrationRequest

    settings = greedy(dict(max_new_tokens=NEW) | values)
    settings.migration_request = MigrationRequest(
        protocol=MigrationProtocol.TCP, remote_engine_id=peer, remote_session_id=transfer, remote_token_id=0,
        remote_block_ids=[],
    )  # fmt: skip
    if is_copy:
        settings.max_new_tokens, settings.with_cache, settings.preserve_cache = 1, True, True
    return await answer(engine, prompt, settings)


def wait_until(is_so: Callable[[], Any], limit_s: float = 10.0) -> None:
    processes.wait_until("it happens", is_so, limit_s, pause_s=0.002)
