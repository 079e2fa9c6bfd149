"""Prompts that another engine is to decode: kept from when they are computed until it has read them, or will not."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sagellm.comm_backend.group_messages import Held
from sagellm.core.errors import TransferError

__all__ = ["Offers", "digest_of"]

logger = logging.getLogger("sagellm")

REMEMBERED = 4096  # transfers whose end is remembered, for those who ask too late


@dataclass(slots=True)
class Offer:
    """One prompt. `reader`: the connection that has asked for it; `timer`: ends the lease, or the wait for the prompt."""

    transfer_id: int
    seq: Any = None
    held: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    since_s: float = 0.0
    reader: Any = None
    reader_id: str = ""
    timer: asyncio.TimerHandle | None = None


class Offers:
    """A prefill engine's side. Every method runs on the engine's loop. `seq` is LMDeploy's `SchedulerSequence`.

    An offer begins with the request or with the question for it. It ends with `release`, with the loss of the caller, or
    with its lease. Then the request leaves the engine. Later callers get this error.

    Args:
        end_session: takes a request out of the engine, and answers its caller.
        changed: an offer has ended.
        slots: where blocks lie in the pool.
        checksums: of blocks, by rank; None: none are made.
        lease_s: for which blocks are kept for somebody who does not come.
    """

    def __init__(
        self, end_session: Callable[[int], Any], changed: Callable[[], Any], slots: Callable[[np.ndarray], np.ndarray],
        checksums: Callable[[tuple[int, ...]], Awaitable[tuple]] | None, lease_s: float,
    ) -> None:  # fmt: skip
        self._end_session, self._changed, self._slots, self._checksums = end_session, changed, slots, checksums
        self._lease_s = lease_s
        self._offers: dict[int, Offer] = {}
        self._num_leaving = 0  # whose offer has ended, and whose request is about to leave
        self._of_session: dict[int, Offer] = {}
        self._ended: dict[int, str] = {}  # transfer id -> why
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._offers) + self._num_leaving

    # ---- what the engine says

    def expect(self, seq: Any, transfer_id: int, reader_id: str) -> None:
        """A prompt has come that is for another engine. A prompt without a caller is not computed."""
        if transfer_id in self._ended:
            self._end_session(seq.session_id)
            return
        offer = self._offer(transfer_id)
        offer.seq, offer.reader_id = seq, reader_id
        self._of_session[seq.session_id] = offer

    def computed(self, seq: Any) -> None:
        """Its step has ended, and LMDeploy keeps its blocks."""
        offer = self._of_session.get(seq.session_id)
        if offer is None:  # LMDeploy's own proxy: the session's number is the transfer's
            if seq.session_id in self._ended:
                return
            offer = self._offer(seq.session_id)
            offer.seq = seq
            self._of_session[seq.session_id] = offer
        if offer.since_s:
            return
        offer.since_s = time.time()
        self._time(offer, self._lease_s, "its lease has ended")
        if not offer.held.done():
            offer.held.set_result(None)

    def kept(self, seq: Any) -> None:
        """LMDeploy's server is through with a request whose blocks are kept. A prompt cancelled before it was computed has
        no owner."""
        offer = self._of_session.get(seq.session_id)
        if offer is None or not offer.since_s:
            self._end_session(seq.session_id)

    def ended(self, session_id: int) -> None:
        """The request leaves the engine."""
        offer = self._of_session.get(session_id)
        if offer is not None:
            self._close(offer, "the prompt was cancelled", leave=False)

    # ---- what the other engine says

    async def fetch(self, transfer_id: int, timeout_s: float, reader: Any) -> Held:
        """When the prompt is computed, where it is. Raises TransferError: it will not be, or not in time."""
        if (why := self._ended.get(transfer_id)) is not None:
            raise TransferError(f"transfer {transfer_id}: {why}.")
        offer = self._offer(transfer_id)
        offer.reader = reader
        if not offer.since_s:
            self._time(offer, timeout_s, f"the prompt was not computed within {timeout_s:g} s")
        await asyncio.shield(offer.held)
        if (why := self._ended.get(transfer_id)) is not None:
            raise TransferError(f"transfer {transfer_id}: {why}.")
        blocks = tuple(self._slots(offer.seq.logical_blocks.get_real_blocks()).tolist())
        num_tokens = offer.seq.num_history_ids
        digest = digest_of(offer.seq.all_ids[:num_tokens])
        drawn = offer.seq.generated_ids.tolist()
        sums = await self._checksums(blocks) if self._checksums is not None else ()
        self.counts["offered"] += 1
        return Held(
            transfer_id=transfer_id, blocks=blocks, num_tokens=num_tokens, computed_at=offer.since_s,
            tokens=digest,
            first_token=drawn[0] if len(drawn) == 1 else None, checksums=sums,
        )  # fmt: skip

    def release(self, transfer_id: int) -> bool:
        """Whether the blocks were held until now. The request leaves in a moment: who asks waits with its first step."""
        offer = self._offers.get(transfer_id)
        if offer is None:
            self._remember(transfer_id, "it is not wanted any more")
            return False
        was_held = bool(offer.since_s)
        self.counts["read" if was_held else "unwanted"] += 1
        if was_held and offer.seq is not None:
            offer.seq.sage_transfer = "read"
        self._close(offer, "it was read, or is not wanted any more", leave=False)
        if offer.seq is not None:
            self._num_leaving += 1
            asyncio.get_running_loop().call_soon(self._leave, offer.seq.session_id)
        return was_held

    def lost(self, reader: Any, reader_id: str) -> None:
        """The other engine has gone: end its offers."""
        for offer in list(self._offers.values()):
            if offer.reader is reader or (offer.reader is None and reader_id and offer.reader_id == reader_id):
                self.counts["reader_lost"] += 1
                self._close(offer, "the engine that asked for it has gone")

    def close(self) -> None:
        for offer in list(self._offers.values()):
            self._close(offer, "the engine ends")

    # ----

    def _offer(self, transfer_id: int) -> Offer:
        offer = self._offers.get(transfer_id)
        if offer is None:
            offer = self._offers[transfer_id] = Offer(transfer_id)
        return offer

    def _time(self, offer: Offer, seconds: float, why: str) -> None:
        if offer.timer is not None:
            offer.timer.cancel()
        offer.timer = asyncio.get_running_loop().call_later(seconds, self._expire, offer, why)

    def _expire(self, offer: Offer, why: str) -> None:
        self.counts["expired"] += 1
        logger.warning("transfer %d: %s; its blocks are free again", offer.transfer_id, why)
        self._close(offer, why)

    def _close(self, offer: Offer, why: str, leave: bool = True) -> None:
        self._offers.pop(offer.transfer_id, None)
        self._remember(offer.transfer_id, why)
        if offer.timer is not None:
            offer.timer.cancel()
        if not offer.held.done():
            offer.held.set_result(None)
        if offer.seq is not None:
            if not hasattr(offer.seq, "sage_transfer"):
                offer.seq.sage_transfer = why
            self._of_session.pop(offer.seq.session_id, None)
            if leave:
                self._end_session(offer.seq.session_id)
        self._changed()

    def _leave(self, session_id: int) -> None:
        self._num_leaving -= 1
        self._end_session(session_id)
        self._changed()

    def _remember(self, transfer_id: int, why: str) -> None:
        self._ended[transfer_id] = why
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]


def digest_of(tokens: np.ndarray) -> str:
    """Digest of a prompt, int [n]: keys and values serve only a request with the same tokens."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes(), digest_size=16).hexdigest()
