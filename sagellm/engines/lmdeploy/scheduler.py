"""What the inserted lines in LMDeploy's scheduler call: one object a scheduler, living as long as it.

Every method here runs on the engine's thread.
"""

import asyncio
import json
import logging
import time
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from sagellm.core.answers import check_admission, check_schedule
from sagellm.core.config import HookConfig
from sagellm.core.errors import PluginError
from sagellm.core.guard import PluginFault
from sagellm.core.hooks import (
    COALESCE_S,
    EvictionReason,
    Phase,
    RequestMetadata,
    StepView,
)
from sagellm.core.host import PluginHost
from sagellm.engines.lmdeploy.handle import Handle
from sagellm.engines.lmdeploy.host_memory import SwapTimes, cache_engine_of
from sagellm.engines.lmdeploy.kv_manager import BUILT_IN, KVManager
from sagellm.engines.lmdeploy.lines import arrive_line, end_line, open_line
from sagellm.engines.lmdeploy.prefix import PrefixHooks
from sagellm.engines.lmdeploy.prefix_cache import PrefixCache, namespace_of, num_shareable
from sagellm.engines.lmdeploy.steps import Steps, step_line

logger = logging.getLogger("sagellm")

_seq_id = attrgetter("seq_id")

# How long until requests that plug-ins hold back are looked at again: this share of the time it has been so, within bounds.
HELD_SHARE, SHORTEST_HELD_S, LONGEST_HELD_S = 10, 0.001, 0.02

PREFIX_INDEX = "prefix index"  # its name among the faults of plug-ins


class SchedulerHooks:
    """The doors of the PyTorch engine, wired to the plug-ins that `spec` (the JSON of a `HookConfig`) names."""

    def __init__(self, scheduler: Any, spec: str) -> None:
        self._scheduler = scheduler
        self._config = HookConfig.model_validate_json(spec)
        self._host = PluginHost(self._config)
        self._recorder = self._host.recorder
        self.cache = PrefixCache(scheduler)
        self.kv = KVManager(scheduler, self._host, self.cache, self._config.block_bytes)
        self.prefix = PrefixHooks(self._host, self.kv, self.cache)
        self._step = 0
        self._is_decoding = False  # the step chosen last
        self._admitted: set[int] = set()
        # seq id -> since when, without a break, it has not been admitted, or was held in steps of this phase
        self._refused_since: dict[int, float] = {}
        self._held_since: dict[Phase, dict[int, float]] = {phase: {} for phase in Phase}
        self._held: set[int] = set()
        self._budget: int | None = None
        self._left: dict[Phase, tuple[float, list[int]]] = {}  # steps left to the engine: until when, which seq ids
        self._num_preempted = 0
        self.tick = self.cache.tick
        scheduler.block_manager.allocator.sage = self
        scheduler.block_trie.sage = self
        self._is_told = bool(self._host.plugins) or self._recorder.enabled  # somebody wants to know what a step was
        self._steps = Steps(self._config.block_bytes)
        if self._recorder.enabled:
            self._recorder.write("open", **open_line(scheduler, self._config, self.cache.enabled))
        self._host.attach(lambda guard: Handle(self.kv, guard, self._recorder, self.tokens_of, self._config.layout))

    def bind(self, executor: Any) -> None:
        """The engine is built."""
        self.kv.cache_engine = engine = cache_engine_of(executor)
        config = self._scheduler.cache_config
        # On a CPU copies are made at once, so that they can be timed; only a plug-in would want to know.
        if config.device_type == "cpu" and config.num_cpu_blocks and self._host.listens("on_step_end") and engine is not None:
            self._steps.swap_times = SwapTimes(engine)

    def tokens_of(self, request_id: int) -> tuple[np.ndarray, str]:
        """(int64 [n], namespace) of a request; of its tokens those that others may share. Raises PluginError: unknown."""
        session = self._scheduler.sessions.get(request_id)
        if session is None or not session.sequences:
            raise PluginError(f"request {request_id} is unknown; it has ended, or never came.")
        seq = next(iter(session.sequences.values()))
        return np.array(seq.valid_ids[: num_shareable(seq)], np.int64), namespace_of(seq)

    # ---- blocks (0001)

    def evict_prefix(self, trie: Any, num_blocks: int) -> int:
        if not self.cache.enabled:
            return 0
        before = self.kv.num_free()
        try:
            return self.kv.evict(num_blocks)
        except Exception as error:
            self._index_failed("evict", error)
        return self.kv.num_free() - before

    def sequence_evicted(self, seq: Any, reason: str) -> None:
        """A request is about to lose its blocks; those that the prefix cache shares stay where they are."""
        if self.cache.enabled:
            try:
                self.prefix.lost_blocks(seq.seq_id)
            except Exception as error:
                self._index_failed("unlock", error)
        blocks = seq.logical_blocks.get_real_blocks()
        own = blocks[~self.cache.is_cached[blocks]].tolist()
        if self._recorder.enabled:
            self._recorder.write("evict", policy=BUILT_IN, reason=reason, request=seq.session_id, victims=own)
        self.kv.tell_evicted(own, EvictionReason(reason), seq.session_id)

    def preempted(self, seq: Any) -> None:
        self._num_preempted += 1
        self._recorder.write("preempt", request=seq.session_id, tokens=seq.num_valid_ids)

    def dispatch(self, running: list[Any], num_loops: int) -> tuple[dict[int, int], dict[int, int]]:
        """A step, or a round of `num_loops` decode steps, is about to be sent; returns the copies to make before it."""
        is_decoding, num_tokens, num_before, seq_ids = self._is_decoding, 0, 0, list(map(_seq_id, running))
        if self._is_told:
            num_tokens = len(running) if is_decoding else sum([seq.num_token_ids for seq in running])
            num_before = sum([seq.num_history_ids for seq in running])
            self._free_forsaken()
        number, ins, outs = self.kv.take_swaps()
        sent_s = time.perf_counter()
        step = self._step, is_decoding, seq_ids, num_tokens, num_before, num_loops, sent_s, number, len(ins), len(outs)
        self._steps.sent(step)
        return ins, outs

    def _free_forsaken(self) -> None:
        """Blocks that a plug-in reserved before it was switched off."""
        for name in self.kv.host_blocks.owners():
            if not self._host.guards[name].healthy:
                self.kv.host_blocks.free_all_of(name)

    # ---- prefixes (0002)

    def lookup_prefix(self, trie: Any, seq: Any) -> bool:
        """Whether LMDeploy's trie has nothing left to do: always, it stays empty."""
        # LMDeploy's migration loop passes the list of all that get their blocks from another engine.
        if self.cache.enabled and not isinstance(seq, list):
            try:
                self.prefix.lookup(seq)
            except Exception as error:
                self._index_failed("lookup", error)
        return True

    def store_prefix(self, trie: Any, seq: Any) -> bool:
        """As `lookup_prefix`. Blocks are published when they are computed: in `step_end`."""
        return True

    def _index_failed(self, call: str, error: Exception) -> None:
        """Something that asks the prefix index has raised `error`: the engine goes on without a prefix cache."""
        logger.error("the prefix index failed; the engine goes on without prefix caching", exc_info=error)
        fault = PluginFault(PREFIX_INDEX, call, "raised", f"{type(error).__name__}: {error}")
        self._host.faults.append(fault)
        self._recorder.write("fault", plugin=fault.plugin, hook=call, kind=fault.kind, detail=fault.detail)
        self.prefix.lost_cache()
        self.kv.lose_cache()

    # ---- scheduling (0003)

    def arrived(self, seq: Any) -> None:
        if self._recorder.enabled:
            self._recorder.write("arrive", **arrive_line(seq))

    def order_waiting(self, waiting: list[Any]) -> list[Any]:
        """The waiting requests that may start in this step, most urgent first."""
        self._budget = None
        if not self._host.plugins:
            self._step += 1
            self._is_decoding = False
            return waiting
        if self._host.decides("admit"):
            waiting = [seq for seq in waiting if self._admits(seq)]
        order, _ = self._choose(Phase.PREFILL, waiting, self._scheduler.cache_config.max_prefill_token_num)
        return order

    def order_running(self, running: list[Any]) -> list[Any]:
        """The running requests that decode in this step; the others keep their blocks and wait."""
        self._budget = None
        if not self._host.plugins:
            self._step += 1
            self._is_decoding = True
            return running
        order, self._held = self._choose(Phase.DECODE, running, self._scheduler.scheduler_config.max_batches)
        if self._budget is not None:
            self._held |= {seq.seq_id for seq in order[self._budget :]}
            order = order[: self._budget]
        return order

    def over_budget(self, num_tokens: int, seq: Any, running: list[Any]) -> bool:
        """Whether `seq` must wait for the next step; the first request of a step always goes."""
        return self._budget is not None and bool(running) and num_tokens + seq.num_token_ids > self._budget

    def holds_all(self) -> bool:
        """Whether nothing runs because plug-ins keep every request waiting."""
        return not self._scheduler.has_running() and self._is_holding()

    async def wait_for_plugins(self, may_run: asyncio.Event) -> bool:
        """Nothing may run now. Where plug-ins hold requests back, look again soon: LMDeploy would in a tenth of a second.

        Returns whether that was so, after a pause that grows with the time they have been holding.
        """
        if not self._is_holding():
            return False
        since = [*self._refused_since.values(), *(each for held in self._held_since.values() for each in held.values())]
        waited_s = time.monotonic() - max(since)
        may_run.set()
        await asyncio.sleep(min(max(waited_s / HELD_SHARE, SHORTEST_HELD_S), LONGEST_HELD_S))
        may_run.clear()
        return True

    def _is_holding(self) -> bool:
        return bool(self._refused_since) or any(self._held_since.values())

    def released(self, running: list[Any]) -> list[Any]:
        return [seq for seq in running if seq.seq_id not in self._held] if self._held else running

    def step_end(self, running: list[Any], is_decoding: bool) -> None:
        if self.cache.enabled:
            try:
                self.prefix.publish(running)
            except Exception as error:
                self._index_failed("extend", error)
        ended = self._steps.ended(list(map(_seq_id, running)), is_decoding)
        if ended is None:
            return
        step, loop, end_s, duration_s = ended
        self.kv.host_blocks.ended(step[7])
        if not self._is_told:
            return
        result = self._steps.result(step, loop, len(running), end_s, duration_s)
        if self._recorder.enabled:
            self._recorder.write("step", **step_line(result))
        if not (self._host.plugins and self._host.listens("on_step_end")):
            return
        self._host.post("on_step_end", result)
        if not self._scheduler.sessions:  # everyone has left; no step may follow for long
            self._host.flush()

    def ended(self, session_id: int) -> None:
        session = self._scheduler.sessions[session_id]
        for seq_id, seq in session.sequences.items():
            if self._host.plugins:
                self._admitted.discard(seq_id)
                self._refused_since.pop(seq_id, None)
                self._held.discard(seq_id)
            if self.cache.enabled:
                try:
                    self.prefix.ended(seq)
                except Exception as error:
                    self._index_failed("unlock", error)
        if self._recorder.enabled:
            self._recorder.write("end", **end_line(session_id, list(session.sequences.values())))
        if not self._host.plugins:
            return
        self._host.notify("on_request_end", session_id)
        self._host.flush()  # it may have been the last one for long

    def _admits(self, seq: Any) -> bool:
        if seq.seq_id in self._admitted:
            return True
        decided = self._host.decide("admit", _metadata(seq, Phase.PREFILL), check_admission)
        if decided is None or decided[1]:
            self._admitted.add(seq.seq_id)
            self._refused_since.pop(seq.seq_id, None)
        elif self._overdue(seq, self._refused_since.setdefault(seq.seq_id, time.monotonic()), "admit"):
            return True
        if decided is not None:
            self._recorder.write("admit", policy=decided[0], request=seq.session_id, admitted=decided[1])
        return seq.seq_id in self._admitted

    def _choose(self, phase: Phase, seqs: list[Any], limit: int) -> tuple[list[Any], set[int]]:
        """(requests of the step in order, ids of those held). Sets the step's token budget."""
        self._step += 1
        self._is_decoding = phase is Phase.DECODE
        if not self._host.decides("schedule"):
            self._host.flush(COALESCE_S)
            return seqs, set()
        decided = None
        if seqs and not self._is_left(phase, seqs):
            view = StepView(self._step, phase, tuple([_metadata(seq, phase) for seq in seqs]), self.kv.num_free(), limit)
            decided = self._host.decide("schedule", view, lambda answer: check_schedule(answer, view))
            if decided is not None and decided[1] is None:
                self._left[phase] = time.monotonic() + COALESCE_S, [seq.seq_id for seq in seqs]
        self._host.flush(COALESCE_S)
        since, self._held_since[phase] = self._held_since[phase], {}
        if decided is None or decided[1] is None:
            return seqs, set()
        name, decision = decided
        by_request = {seq.session_id: seq for seq in seqs}
        held = {by_request[request].seq_id for request in decision.hold}
        now = time.monotonic()
        self._held_since[phase] = {seq_id: since.get(seq_id, now) for seq_id in held}
        for request in decision.hold:
            seq = by_request[request]
            if self._overdue(seq, self._held_since[phase][seq.seq_id], "schedule"):
                return seqs, set()
        self._budget = decision.token_budget
        self._recorder.write(
            "schedule", policy=name, step=self._step, phase=phase.value, order=list(decision.order),
            hold=decision.hold, token_budget=decision.token_budget, reason=decision.reason,
        )  # fmt: skip
        return [by_request[r] for r in decision.order if by_request[r].seq_id not in held], held

    def _is_left(self, phase: Phase, seqs: list[Any]) -> bool:
        """Whether the plug-in left steps with just these requests to the engine, a moment ago."""
        until_s, seq_ids = self._left.get(phase, (0.0, []))
        return time.monotonic() < until_s and seq_ids == [seq.seq_id for seq in seqs]

    def _overdue(self, seq: Any, since_s: float, hook: str) -> bool:
        """True once a request was kept waiting for too long; the plug-in that did it is then off."""
        waited = time.monotonic() - since_s
        if waited <= self._config.hold_limit_s:
            return False
        self._host.blame(hook, f"request {seq.session_id} was kept waiting for {waited:.1f} s")
        return True

    # ---- report

    def report(self) -> dict[str, Any]:
        """What `/metrics` shows; picklable."""
        workers = _worker_reports(self._config)
        own = self._host.report()
        return {
            "blocks": self.kv.counts()._asdict(),
            "evicted": {reason.value: number for reason, number in self.kv.evicted.items()},
            "migrated": {tier.value: number for tier, number in self.kv.migrated.items()},
            "preempted": self._num_preempted,
            "prefix": asdict(self.prefix.first),
            "prefix_retries": asdict(self.prefix.retries),
            "prefix_index": self.cache.metrics(),
            "step_s": self._steps.seconds,
            "plugins": self._host.plugin_reports(),
            "comm_ns": [row for worker in workers for row in worker["comm_ns"]],
            "calls": own["calls"] + [row for worker in workers for row in worker["calls"]],
            "faults": own["faults"] + [row for worker in workers for row in worker["faults"]],
            "enabled": {
                name: on and all(worker["enabled"].get(name, True) for worker in workers)
                for name, on in own["enabled"].items()
            },
        }

    def close(self) -> None:
        self._host.close()


def _metadata(seq: Any, phase: Phase) -> RequestMetadata:
    return RequestMetadata(
        request_id=seq.session_id,
        phase=phase,
        num_tokens=seq.num_valid_ids,
        num_computed=seq.num_history_ids,
        num_generated=seq.num_new_tokens,
        num_blocks=seq.num_blocks,
        arrival_s=seq.arrive_time,
        adapter=seq.adapter_name or "",
    )


def _worker_reports(config: HookConfig) -> list[dict[str, Any]]:
    if config.run_dir is None:
        return []
    reports = []
    for file in sorted(config.run_dir.glob("rank*.json")):
        try:
            reports.append(json.loads(file.read_text()))
        except (OSError, ValueError):  # replaced or removed meanwhile; the next report has it
            continue
    return reports
