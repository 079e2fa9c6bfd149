"""Backends that break the contract, each in one way. `BREAKS`: the rule that must say so, and the scenarios to play."""

import os
import time
from contextlib import suppress

import torch

from sagellm.comm_backend.base import ReduceOp, Work
from sagellm.comm_backend.memory import MemoryBackend, _Part
from sagellm.comm_backend.torch_groups import GlooBackend
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError


class Then(Work):
    """Work with something behind it, done once."""

    def __init__(self, work, then):
        self.work, self.then = work, then

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        self.work.wait()
        then, self.then = self.then, lambda: None
        then()


class Done(Work):
    def is_completed(self):
        return True

    def wait(self):
        pass


class Unbuilt(MemoryBackend):
    def _open(self):
        raise RuntimeError("no")


class AnyOption(MemoryBackend):
    def _open(self):
        self.config = self.config.model_copy(update={"options": {}})
        super()._open()


class LonelyError(MemoryBackend):
    def _open(self):
        try:
            super()._open()
        except CommTimeoutError as error:
            raise CommError(str(error)) from None


class WithoutLast(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        if self.rank == self.world_size - 1 and op is ReduceOp.SUM:
            tensor.zero_()
        return super()._start_all_reduce(tensor, op, timeout_s)


class NoMaxOfBytes(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        wrong = op is ReduceOp.MAX and tensor.dtype is torch.uint8
        return super()._start_all_reduce(tensor, ReduceOp.MIN if wrong else op, timeout_s)


class OtherBits(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        def then():
            if self.rank == 1 and tensor.dtype is torch.float32 and op is ReduceOp.SUM:
                tensor.copy_(torch.nextafter(tensor, tensor + 1))

        return Then(super()._start_all_reduce(tensor, op, timeout_s), then)


class SkipsOne(MemoryBackend):
    """Rank 1 takes no part in its second sum."""

    num_sums = 0

    def _start_all_reduce(self, tensor, op, timeout_s):
        self.num_sums += 1
        if self.rank == 1 and self.num_sums == 2:
            return Done()
        return super()._start_all_reduce(tensor, op, timeout_s)


class SwapsTwo(MemoryBackend):
    """Rank 1 begins the second of two sums under way before the first."""

    kept = None

    def _start_all_reduce(self, tensor, op, timeout_s):
        if self.rank != 1:
            return super()._start_all_reduce(tensor, op, timeout_s)
        if self.kept is None:
            self.kept = Swapped(super()._start_all_reduce, (tensor, op, timeout_s))
            return self.kept
        work, kept, self.kept = super()._start_all_reduce(tensor, op, timeout_s), self.kept, None
        kept.begin()
        return work


class Swapped(Work):
    """A sum that begins when the one after it has begun, or somebody asks for its end."""

    def __init__(self, start, arguments):
        self.start, self.arguments, self.work = start, arguments, None

    def begin(self):
        self.work = self.work or self.start(*self.arguments)
        return self.work

    def is_completed(self):
        return self.begin().is_completed()

    def wait(self):
        self.begin().wait()


class OwnFirst(MemoryBackend):
    """Each rank adds up in an order of its own, beginning with what it has itself."""

    def _start_all_reduce(self, tensor, op, timeout_s):
        if op is not ReduceOp.SUM or not tensor.is_floating_point() or not tensor.numel():
            return super()._start_all_reduce(tensor, op, timeout_s)
        every = tensor.new_empty(self.world_size, *tensor.shape)
        work = super()._start_all_gather(every, tensor.clone(), timeout_s)

        def then():
            total = every[self.rank].clone()
            for step in range(1, self.world_size):
                total += every[(self.rank + step) % self.world_size]
            tensor.copy_(total)

        return Then(work, then)


class StalePiece(MemoryBackend):
    """Rank 1 reads the second half of a large sum before it is there: what the memory had before."""

    def _start_all_reduce(self, tensor, op, timeout_s):
        half = tensor.view(-1)[tensor.numel() // 2 :]
        before = half.clone()
        work = super()._start_all_reduce(tensor, op, timeout_s)
        return Then(work, lambda: half.copy_(before)) if self.rank == 1 and tensor.numel() > 1000 else work


class Rotated(MemoryBackend):
    def _start_all_gather(self, output, tensor, timeout_s):
        work = super()._start_all_gather(output, tensor, timeout_s)
        return Then(work, lambda: output.copy_(output.clone().roll(1, 0)))


class InputChanged(MemoryBackend):
    def _start_all_gather(self, output, tensor, timeout_s):
        return Then(super()._start_all_gather(output, tensor, timeout_s), tensor.zero_)


class FromZero(MemoryBackend):
    def _start_broadcast(self, tensor, src, timeout_s):
        return super()._start_broadcast(tensor, 0, timeout_s)


class NoBarrier(MemoryBackend):
    def _start_barrier(self, timeout_s):
        return Done()


class NewestFirst(MemoryBackend):
    def _start_send(self, tensor, dst, timeout_s):
        work = super()._start_send(tensor, dst, timeout_s)
        with self._group.changed:
            self._group.sent[self.rank, dst].rotate(1)
        return work


class Crossed(MemoryBackend):
    def _start_send(self, tensor, dst, timeout_s):
        rank = self.rank
        if dst == 2:
            self.rank = 1 - rank
        try:
            return super()._start_send(tensor, dst, timeout_s)
        finally:
            self.rank = rank


class SharesMessages(MemoryBackend):
    def _start_send(self, tensor, dst, timeout_s):
        shared = tensor.view_as(tensor)
        shared.clone = lambda: shared
        return super()._start_send(shared, dst, timeout_s)


class EatsMessages(MemoryBackend):
    def _start_send(self, tensor, dst, timeout_s):
        return Then(super()._start_send(tensor, dst, timeout_s), tensor.zero_)


class SendsWhenWanted(MemoryBackend):
    """Does not return from a large send before somebody receives."""

    def _start_send(self, tensor, dst, timeout_s):
        with self._group.changed:
            if tensor.numel() > 100_000 and not self._group.changed.wait_for(
                lambda: self._group.wanted[self.rank, dst], 0.3
            ):
                raise CommTimeoutError("nobody receives")
        return super()._start_send(tensor, dst, timeout_s)


class NeverCompleted(MemoryBackend):
    def _start_recv(self, tensor, src, timeout_s):
        work = super()._start_recv(tensor, src, timeout_s)
        work.is_completed = lambda: False
        return work


class OnceOnly(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        work = super()._start_all_reduce(tensor, op, timeout_s)
        again = Then(work, lambda: None)
        again.wait = lambda: (work.wait(), setattr(again, "wait", lambda: 1 / 0))
        return again


class NoEmpty(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        1 / tensor.numel()
        return super()._start_all_reduce(tensor, op, timeout_s)


class OneGroup(MemoryBackend):
    shared: dict = {}  # noqa: RUF012

    def _open(self):
        key = (self.config.rendezvous.removesuffix("-first").removesuffix("-second"), self.rank)
        if key not in self.shared:
            super()._open()
            self.shared[key] = self._group
        self._group = self.shared[key]


class LooksAround(MemoryBackend):
    """Its all_reduce fails if another rank goes right behind it."""

    def _start_all_reduce(self, tensor, op, timeout_s):
        def then():
            end_s = time.monotonic() + 2
            while self.rank == 0 and time.monotonic() < end_s:
                if self._group.left:
                    raise CommPeerError("somebody has gone")
                time.sleep(0.01)

        return Then(super()._start_all_reduce(tensor, op, timeout_s), then)


class Late(MemoryBackend):
    def _start_recv(self, tensor, src, timeout_s):
        return super()._start_recv(tensor, src, timeout_s + 1)


class OtherError(MemoryBackend):
    def _start_barrier(self, timeout_s):
        work = super()._start_barrier(timeout_s)
        inner = work.wait

        def wait():
            try:
                inner()
            except CommTimeoutError as error:
                raise CommError(str(error)) from None

        work.wait = wait
        return work


class Mended(MemoryBackend):
    """Forgets that a deadline has passed."""

    def _start_recv(self, tensor, src, timeout_s):
        work = super()._start_recv(tensor, src, timeout_s)
        inner = work.wait

        def wait():
            try:
                inner()
            except CommTimeoutError:
                self._group.failure = None
                self._group.wanted[src, self.rank].clear()
                raise

        work.wait = wait
        return work


class FromNobody(MemoryBackend):
    def _start_recv(self, tensor, src, timeout_s):
        try:
            work = super()._start_recv(tensor, src, timeout_s)
        except CommPeerError:
            return Done()
        inner = work.wait

        def wait():
            with suppress(CommPeerError):
                inner()

        work.wait = wait
        return work


class OpenAfterClose(MemoryBackend):
    def _check(self, *tensors):
        self._is_closed, is_closed = False, self._is_closed
        try:
            super()._check(*tensors)
        finally:
            self._is_closed = is_closed

    def _start_send(self, tensor, dst, timeout_s):
        return Done() if self._is_closed else super()._start_send(tensor, dst, timeout_s)


class ClosesOnce(MemoryBackend):
    def close(self):
        if self._is_closed:
            raise KeyError("closed")
        super().close()


class AnyRank(MemoryBackend):
    def _check_rank(self, rank, is_peer=False):
        pass


class Offended(MemoryBackend):
    """Misuse breaks the group."""

    def _check_rank(self, rank, is_peer=False):
        try:
            super()._check_rank(rank, is_peer)
        except CommError as error:
            self._group.break_with(error)
            raise


class Blind(MemoryBackend):
    def _start_all_reduce(self, tensor, op, timeout_s):
        return super()._start_all_reduce(tensor.view(-1)[:4], op, timeout_s)


class BlindForMessages(MemoryBackend):
    def _start_recv(self, tensor, src, timeout_s):
        with self._group.changed:
            work = _Part(self._group, "recv", {src}, timeout_s, [torch.empty(5)])
            self._group.wanted[src, self.rank].append(work)
            self._group.deliver(src, self.rank)
        return Then(work, lambda: tensor.copy_(work.tensors[0][: tensor.numel()]))


class Dies(GlooBackend):
    def _start_all_gather(self, output, tensor, timeout_s):
        os._exit(3) if self.rank else time.sleep(0.1)


class Hangs(GlooBackend):
    def _start_all_gather(self, output, tensor, timeout_s):
        time.sleep(1000)


class SurvivesAnything(GlooBackend):
    """Takes a rank that has gone for one that is through."""

    def _failed(self, error, timeout_s):
        failure = super()._failed(error, timeout_s)
        return None if isinstance(failure, CommPeerError) else failure


BREAKS = {
    Unbuilt: ("builds", ""),
    AnyOption: ("options", "joining"),
    LonelyError: ("meets", "joining"),
    WithoutLast: ("all_reduce", "collectives"),
    NoMaxOfBytes: ("all_reduce", "collectives"),
    OtherBits: ("same_bits", "collectives"),
    SkipsOne: ("all_reduce", "collectives"),
    SwapsTwo: ("asynchronous", "asynchronous"),
    OwnFirst: ("same_bits", "collectives"),
    StalePiece: ("all_reduce", "collectives"),
    Rotated: ("all_gather", "collectives"),
    InputChanged: ("all_gather", "collectives"),
    FromZero: ("broadcast", "collectives"),
    NoBarrier: ("barrier", "collectives"),
    NewestFirst: ("order", "messages"),
    Crossed: ("apart", "messages"),
    SharesMessages: ("reuse", "messages"),
    EatsMessages: ("reuse", "messages"),
    SendsWhenWanted: ("both_ways", "large"),
    NeverCompleted: ("asynchronous", "asynchronous"),
    OnceOnly: ("asynchronous", "asynchronous"),
    NoEmpty: ("empty", "empties"),
    OneGroup: ("groups", "groups"),
    LooksAround: ("leaves", "leaving"),
    Late: ("deadline", "deadlines"),
    OtherError: ("deadline", "deadlines"),
    Mended: ("broken", "deadlines"),
    FromNobody: ("peer_left", "departing"),
    OpenAfterClose: ("closed", "closing"),
    ClosesOnce: ("closed", "closing"),
    AnyRank: ("misuse", "misuse"),
    Offended: ("misuse", "misuse"),
    Blind: ("mismatch", "mismatches"),
    BlindForMessages: ("mismatch", "mismatches"),
    Dies: ("ends", "collectives"),
    Hangs: ("ends", "collectives"),
    SurvivesAnything: ("peer_killed", "killing"),
}
FOLLOWS = {
    StalePiece: {"same_bits"}, Mended: {"deadline"}, Dies: {"all_gather"}, Late: {"broken"}, Crossed: {"reuse"},
    FromNobody: {"broken"},
}  # fmt: skip
