"""Branches of requests: what they share with the rest of their group, and who waits for whose prompt.

A request, its branches, and theirs are a group. Its members begin with the same tokens. A branch waits, out of LMDeploy's
queues, while the first member computes its prompt. Then it takes the whole blocks of a member by reference, and a copy of the
block that is full in part. Tokens are compared, so a branch never gets keys and values of another text. Where no
member has any, a branch computes its prompt itself, so it never waits in vain.

Between two calls each block is in the tables of its owners and nowhere else: nothing is left behind when they end.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sagellm.engines.lmdeploy.pooling import needs_every_token
from sagellm.engines.lmdeploy.prefix_cache import PrefixCache, num_shareable
from sagellm.engines.lmdeploy.requests import parent_of

__all__ = ["Branches"]


class Branches:
    """Owned by one scheduler. `seq` is LMDeploy's `SchedulerSequence`.

    Args:
        lookup: gives a sequence the cached blocks of its tokens.
        num_fresh: returns how many tokens of a prompt are always computed.
        note: called with what is written to a record about a branch that starts.

    Attributes:
        may_copy: False where blocks hold more than the model's keys and values; then whole blocks alone are shared.
    """

    def __init__(
        self, scheduler: Any, cache: PrefixCache, lookup: Callable[[Any], Any], num_fresh: Callable[[], int],
        note: Callable[..., None],
    ) -> None:  # fmt: skip
        from lmdeploy.pytorch.messages import MessageStatus as Status

        self._scheduler, self._cache = scheduler, cache
        self._lookup, self._num_fresh, self._note = lookup, num_fresh, note
        self._parked_as, self._queued = Status.STOPPED, Status.WAITING
        self._alive = (Status.WAITING, Status.RUNNING, Status.LOCKED)
        self._has_blocks = (Status.RUNNING, Status.LOCKED, Status.STOPPED)
        self._allocator = scheduler.block_manager.allocator
        self._groups: dict[int, dict[int, Any]] = {}  # group id -> members that are here, by request id, as they came
        self._parked: dict[int, Any] = {}  # request id -> branch that is in no queue yet
        self._due: dict[int, int] = {}  # seq id -> tokens that it shares once it joins a step
        self._joined: set[int] = set()  # seq ids that have joined the step that is being made
        self._copies: dict[int, int] = {}  # slot of the pool -> the slot that it becomes a copy of, with the next pass
        self.may_copy = True
        self._counts = {"branches": 0, "shared_tokens": 0, "copied_blocks": 0}

    # ---- members

    def arrived(self, seq: Any) -> None:
        """A request is in the queue. Put it into its group; park it if another member computes its prompt."""
        parent, group_id = parent_of(seq), seq.session_id
        if parent is None and group_id not in self._groups:
            return
        if parent is not None:  # else some of its branches were faster
            self._counts["branches"] += 1
            group_id, known = parent, self._scheduler.sessions.get(parent)
            for each in known.sequences.values() if known is not None else ():
                group_id = getattr(each, "sage_group", parent)
                self._join(each, group_id)
        self._join(seq, group_id)
        if self._must_wait(seq):
            seq.status = self._parked_as
            self._parked[seq.session_id] = seq

    def _join(self, seq: Any, group_id: int) -> None:
        seq.sage_group = group_id
        self._groups.setdefault(group_id, {})[seq.session_id] = seq

    def ended(self, session_id: int) -> None:
        """A request is about to lose its blocks and to leave. Members that wait may share them first."""
        for seq in self._scheduler.sessions[session_id].sequences.values():
            members = self._groups.get(getattr(seq, "sage_group", -1))
            if members is None:
                continue
            self.share()
            self._due.pop(seq.seq_id, None)
            self._parked.pop(session_id, None)
            del members[session_id]
            if not members:
                del self._groups[seq.sage_group]
        self.queue()

    def lost_blocks(self, seq: Any) -> None:
        self._due.pop(seq.seq_id, None)

    def queue(self) -> None:
        """Queue the branches that need not wait any more."""
        for request, seq in list(self._parked.items()):
            if not self._must_wait(seq):
                del self._parked[request]
                if seq.session.status is not self._parked_as:  # else its client has stopped it
                    seq.status = self._queued

    def _must_wait(self, seq: Any) -> bool:
        """Whether the first member of its group computes tokens that this one could share."""
        running = (each for each in self._groups[seq.sage_group].values() if each.status in self._alive)
        first = next(running, seq)
        if first is seq or first.num_new_tokens:
            return False
        # The last token of a request is never computed, so its owner has one less.
        return self._best(seq)[1] + 1 < self._num_equal(seq, first)

    # ---- sharing

    def _num_equal(self, seq: Any, other: Any) -> int:
        """First tokens of `seq` that are those of `other` as well, without those that must be computed."""
        limit = min(num_shareable(seq), num_shareable(other), seq.num_valid_ids - self._num_fresh())
        if limit <= 0 or seq.adapter_name != other.adapter_name or seq.return_logits or needs_every_token(seq):
            return 0
        differs = seq.all_ids[:limit] != other.all_ids[:limit]
        place = int(differs.argmax())
        return place if differs[place] else limit

    def _can_give(self, seq: Any) -> bool:
        """Whether the first blocks of the sequence hold its first tokens now, before the pass that is being made."""
        return (
            seq.status in self._has_blocks and seq.seq_id not in self._joined and not seq.num_ignored_history
            and 0 < seq.num_history_ids <= seq.num_blocks * seq.block_size
        )  # fmt: skip

    def _best(self, seq: Any, enough: int | None = None) -> tuple[Any, int]:
        """(member, number of its computed tokens that are the sequence's too) of the one that has most of them.

        Args:
            enough: content with the first one that has so many.
        """
        best, most = None, 0
        limit = seq.num_valid_ids - self._num_fresh() if enough is None else enough
        if not self._can_share(seq):
            return best, most
        for other in self._groups[seq.sage_group].values():
            if most >= limit:
                break
            if other is not seq and self._can_give(other) and other.num_history_ids > most:
                if (found := min(self._num_equal(seq, other), other.num_history_ids)) > most:
                    best, most = other, found
        return best, most

    def _can_share(self, seq: Any) -> bool:
        scheduler = self._scheduler
        return (
            type(seq).__name__ == "SchedulerSequenceDefault" and not scheduler.is_ssm
            and scheduler.cache_config.window_size <= 1
        )  # fmt: skip

    def share(self) -> None:
        """Before a step is chosen, and before a member leaves: queued branches without blocks share those of a member.

        A branch that waits may lose them again as any other request. It shares anew then.
        """
        self._joined.clear()
        if not self._groups:
            return
        for seq in self._scheduler.waiting:
            is_bare = not seq.num_blocks and not seq.num_history_ids
            if is_bare and getattr(seq, "sage_group", None) in self._groups:
                self._share(seq)

    def _share(self, seq: Any) -> None:
        member, num_tokens = self._best(seq)
        if member is None:
            return
        num_whole, rest = divmod(num_tokens, seq.block_size)
        if not self.may_copy:
            num_tokens -= rest
        if self._cache.enabled:
            self._lookup(seq)
        elif num_whole:
            blocks = member.logical_blocks[:num_whole].copy()
            self._allocator.add_ref_count(blocks, 1)
            seq.logical_blocks.append(blocks)
            seq.set_step(num_whole * seq.block_size)
        if seq.num_blocks == num_whole:
            self._due[seq.seq_id] = num_tokens
            seq.set_step(num_tokens)

    def joins(self, seq: Any) -> None:
        """The sequence joins a step of prompts and has its blocks. Let the one that is full in part become a copy."""
        if getattr(seq, "sage_group", None) is None:
            return
        num_tokens = self._due.pop(seq.seq_id, 0)
        self._joined.add(seq.seq_id)
        if not num_tokens or seq.num_history_ids != num_tokens:  # or it has lost or found blocks since
            return
        place, rest = divmod(num_tokens, seq.block_size)
        if rest:
            member, found = self._best(seq, enough=num_tokens)
            if found < num_tokens:  # the owner has left
                seq.set_step(place * seq.block_size)
            else:
                ids = np.array([seq.logical_blocks[place], member.logical_blocks[place]])
                target, source = self._allocator.get_physical_blocks(ids).tolist()
                self._copies[target] = source
                self._counts["copied_blocks"] += 1
        self._counts["shared_tokens"] += seq.num_history_ids
        self._note(
            request=seq.session_id, group=seq.sage_group, tokens=seq.num_valid_ids, shared=seq.num_history_ids,
            copied=int(seq.num_history_ids % seq.block_size > 0),
        )  # fmt: skip

    def take_copies(self) -> dict[int, int]:
        """{slot of the pool: slot to copy} of the pass that is sent now."""
        self._joined.clear()
        copies, self._copies = self._copies, {}
        return copies

    def report(self) -> dict[str, int]:
        return self._counts | {"waiting": len(self._parked)}
