"""Requests whose prompt another engine computes: held back until its keys and values are here, or will not come."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from sagellm.comm_backend.group_messages import Fetch, Held, Release, Released, StepCost
from sagellm.comm_backend.kv_transfer.base import TransferPlan
from sagellm.core.errors import PeerError, SageError, TransferError, TransferTimeoutError
from sagellm.core.tasks import within
from sagellm.engines.lmdeploy.pd.offers import digest_of
from sagellm.engines.lmdeploy.pd.peers import Peers

__all__ = ["Arrivals"]

logger = logging.getLogger("sagellm")

SURE_S = 5.0  # to hear that blocks were held until they were read
REMEMBERED = 1024  # requests, of which times are reported


class Expired(TransferTimeoutError):
    """A prompt that was not computed while this engine waited for it."""


class Arrivals:
    """A decode engine's side. Every method runs on the engine's loop. `seq` is LMDeploy's `SchedulerSequence`.

    A request gets all keys and values but those of its last token, and joins the queue. Its first token was drawn where the
    prompt was computed, and is given out at once. Where more than the token counts (log probabilities, a grammar, a stop word)
    the step of the prompt's last token is made here instead, and draws it as if the prompt had been computed here. After
    any failure the request joins the queue without keys and values, which are computed here.

    Args:
        transfer: (plan) -> result, of all workers.
        cancel: (transfer id of a plan).
        wake: something is in the queue.
        say: (request, token) gives out its first token.
        told: a transfer was made, which took so long.
        token_bytes: keys and values of a token on one worker.
    """

    def __init__(
        self, scheduler: Any, peers: Peers, transfer: Callable[[TransferPlan], Awaitable[Any]],
        cancel: Callable[[str], None], wake: Callable[[], None], say: Callable[[Any, int], None],
        told: Callable[[StepCost], None], timeout_s: float, token_bytes: int,
    ) -> None:  # fmt: skip
        from lmdeploy.pytorch.messages import MessageStatus, UpdateTokenMode

        self._status, self._as_prompt = MessageStatus, UpdateTokenMode.PREFILL
        self._scheduler, self._peers = scheduler, peers
        self._transfer, self._cancel, self._wake, self._say, self._told = transfer, cancel, wake, say, told
        self._timeout_s, self._token_bytes = timeout_s, token_bytes
        self._tasks: dict[int, asyncio.Task] = {}  # by session id
        self._moving: dict[int, str] = {}  # session id -> transfer id of its plan
        self._room = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.num_bytes = 0
        # Seconds from the end of a prompt's step on the other engine, by the clocks of both.
        self.first_token_s: deque[float] = deque(maxlen=REMEMBERED)  # until its first token was given out here
        self.joined_s: deque[float] = deque(maxlen=REMEMBERED)  # until the request joined the queue, without the transfer
        # Until the first token that was computed here, without the transfer: the step that computed it, and all the rest.
        self.decoded_s: deque[float] = deque(maxlen=REMEMBERED)
        self.step_s: deque[float] = deque(maxlen=REMEMBERED)
        self.waited_s: deque[float] = deque(maxlen=REMEMBERED)
        self._joined: dict[int, float] = {}  # session id -> when its prompt's step ended, and the transfer's seconds after that

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, seq: Any) -> None:
        """A request has come that waits for its keys and values."""
        if seq.session_id not in self._tasks:
            task = asyncio.create_task(self._arrive(seq), name=f"sagellm-arrival-{seq.session_id}")
            self._tasks[seq.session_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(seq.session_id, None))

    def ended(self, session_id: int) -> None:
        """The request leaves the engine. A transfer that runs keeps its blocks until it has ended."""
        self._joined.pop(session_id, None)
        if (moving := self._moving.get(session_id)) is not None:
            self._cancel(moving)
        if (task := self._tasks.get(session_id)) is not None and moving is None:
            task.cancel()

    def step_end(self, running: list[Any], step_s: float) -> None:
        """A step has ended, which took so long."""
        if not self._joined:
            return
        now_s = time.time()
        for seq in running:
            if (since_s := self._joined.pop(seq.session_id, None)) is not None:
                self.decoded_s.append(now_s - since_s)
                self.step_s.append(step_s)
                self.waited_s.append(now_s - since_s - step_s)

    def freed(self) -> None:
        """Blocks may have become free."""
        self._room.set()

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ----

    async def _arrive(self, seq: Any) -> None:
        request = seq.migration_request
        transfer_id, engine_id = request.remote_session_id, request.remote_engine_id
        begin_s = time.monotonic()
        num_done, peer = 0, None
        try:
            peer = await self._peers.find(engine_id)
            held = await self._fetch(peer, transfer_id)
            self.seconds["prompt"] += time.monotonic() - begin_s
            self._check(seq, held)
            if self._take_first(seq, held.first_token):
                self.first_token_s.append(time.time() - held.computed_at)
            num_done, transfer_s = await self._bring(seq, held, engine_id, peer)
            self.joined_s.append(time.time() - held.computed_at - transfer_s)
            if num_done:
                seq.sage_transfer = "arrived"
                self._joined[seq.session_id] = held.computed_at + transfer_s
        except (SageError, asyncio.TimeoutError, OSError) as error:  # TimeoutError is an OSError
            self._failed(seq, error, engine_id)
        except asyncio.CancelledError:  # the request has left
            self.counts["cancelled"] += 1
        except Exception:
            logger.exception("request %s goes on without the keys and values of %s", seq.session_id, engine_id)
            self.counts["failed"] += 1
        finally:
            if not num_done and peer is not None:
                self._forget(peer, transfer_id)
            self._join(seq, num_done)

    async def _fetch(self, peer: Any, transfer_id: int) -> Held:
        """Raises Expired: the prompt was not computed in time. PeerError: it never will be."""
        timeout_s, begin_s = self._timeout_s, time.monotonic()
        try:
            return await peer.call(Fetch(transfer_id=transfer_id, timeout_s=timeout_s), timeout_s + 1.0)
        except PeerError as error:  # of a peer that lives, or that hangs
            if time.monotonic() - begin_s >= timeout_s:
                raise Expired(str(error)) from None
            raise

    def _check(self, seq: Any, held: Held) -> None:
        num_tokens = seq.num_valid_ids
        if held.num_tokens != num_tokens or held.tokens != digest_of(seq.valid_ids):
            raise TransferError(
                f"the prompt has {num_tokens} tokens here and {held.num_tokens} there, and they are not the same; both engines "
                "need the same tokenizer and chat template."
            )

    def _take_first(self, seq: Any, token: int | None) -> bool:
        """Whether the first token of the answer was given out: if nothing but the token itself is wanted of its step."""
        if token is None or seq.status is not self._status.WAITING_MIGRATION or not _is_plain(seq, token):
            return False
        seq.update_token_ids(np.array([token]), mode=self._as_prompt)
        seq.set_step(0)  # nothing is computed here yet
        self.counts["first_tokens"] += 1
        self._say(seq, token)
        return True

    async def _bring(self, seq: Any, held: Held, engine_id: str, peer: Any) -> tuple[int, float]:
        """Tokens of the request whose keys and values are on the device in the end, 0 if it has left meanwhile; seconds of the
        transfer."""
        begin_s, transfer_s = time.monotonic(), 0.0
        await self._find_room(seq)
        self.seconds["room"] += time.monotonic() - begin_s
        if seq.status is not self._status.WAITING_MIGRATION:
            return 0, 0.0
        manager, size = self._scheduler.block_manager, seq.block_size
        num_cached = seq.num_history_ids
        num_wanted = seq.num_valid_ids - 1  # one token must be left to compute
        num_blocks = -(-num_wanted // size)
        first = num_cached // size
        blocks = seq.logical_blocks.get_real_blocks()[first:num_blocks].copy()
        if len(blocks):
            slots = manager.allocator.get_physical_blocks(blocks)
            plan = TransferPlan(
                transfer_id=f"{seq.session_id}/{held.transfer_id}", source=engine_id, block_ids=held.blocks,
                target_blocks=tuple(slots.tolist()), first_token=num_cached, num_tokens=num_wanted - num_cached,
                target_start=first * size, timeout_s=self._timeout_s, checksums=held.checksums,
                total_bytes=self._token_bytes * (num_wanted - num_cached),
            )  # fmt: skip
            seq.status = self._status.RUNNING_MIGRATION
            manager.allocator.add_ref_count(blocks, 1)  # the transfer writes into them, whatever becomes of the request
            self._moving[seq.session_id] = plan.transfer_id
            try:
                result = await self._transfer(plan)
            finally:
                del self._moving[seq.session_id]
                manager.allocator.free(blocks)
                self.freed()
            transfer_s = result.seconds
            self.seconds["transfer"] += transfer_s
            self.num_bytes += result.num_bytes
            self._told(
                StepCost(kind="transfer", num_tokens=plan.num_tokens, num_bytes=result.num_bytes, seconds=result.seconds)
            )
        released: Released = await peer.call(Release(transfer_id=held.transfer_id), SURE_S)
        if not released.was_held:
            raise TransferError("the other engine did not keep the blocks until they were read")
        self.counts["done"] += 1
        self.seconds["whole"] += time.monotonic() - begin_s
        return num_wanted, transfer_s

    async def _find_room(self, seq: Any) -> None:
        """Blocks for the request, those of the prefix cache first. Raises TransferTimeoutError: none became free in time."""
        scheduler, deadline_s = self._scheduler, time.monotonic() + self._timeout_s
        while seq.status is self._status.WAITING_MIGRATION:
            self._room.clear()
            scheduler.block_trie.match(seq)
            if scheduler.eviction_helper.evict_for_seq(seq, [], 0):
                scheduler.block_manager.allocate(seq)
                return
            try:
                await within(self._room.wait(), deadline_s - time.monotonic())
            except asyncio.TimeoutError:
                raise TransferTimeoutError(f"no room for {seq.num_valid_ids} tokens within {self._timeout_s:g} s") from None

    def _join(self, seq: Any, num_done: int) -> None:
        """The request takes its place in the queue, if it is still there."""
        status = self._status
        if seq.status not in (status.WAITING_MIGRATION, status.RUNNING_MIGRATION):
            return
        if num_done:
            seq.set_step(num_done)
            self._scheduler.sage.publish([seq])
        else:
            self._scheduler.sage.back_to_cached(seq)
        seq.status = status.WAITING
        self._wake()

    def _forget(self, peer: Any, transfer_id: int) -> None:
        """It is not read any more. That it is lost with the connection, or by its lease, is as good."""

        async def tell() -> None:
            with contextlib.suppress(PeerError, asyncio.TimeoutError, OSError):
                await peer.call(Release(transfer_id=transfer_id), SURE_S)

        task = asyncio.get_running_loop().create_task(tell())
        self._peers.keep(task)

    def _failed(self, seq: Any, error: Exception, engine_id: str) -> None:
        kind = {PeerError: "peer", TransferTimeoutError: "timeout", Expired: "expired"}.get(type(error), "transfer")
        self.counts[f"failed_{kind}"] += 1
        seq.sage_transfer = f"{engine_id}: {error}"
        logger.warning("request %s: its prompt is computed here: %s: %s", seq.session_id, engine_id, error)


def _is_plain(seq: Any, token: int) -> bool:
    asked = seq.sampling_param
    wants_more = (
        asked.num_logprobs >= 0 or asked.response_format or asked.logits_processors or asked.out_logits
        or asked.out_last_hidden_states or asked.return_routed_experts
    )  # fmt: skip
    ends = asked.max_new_tokens <= 1 or token in (asked.stop_words or ())
    return not (wants_more or ends or seq.num_new_tokens) and type(seq).__name__ == "SchedulerSequenceDefault"
