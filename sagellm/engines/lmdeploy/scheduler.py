"""The object that the inserted lines in LMDeploy's scheduler call; each scheduler has one.

Every method here runs on the engine's thread.
"""

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from sagellm.core.collectives import GROUP, CommRule
from sagellm.core.config import HookConfig
from sagellm.core.errors import PluginError, PolicyError, SageError
from sagellm.core.guard import PluginFault
from sagellm.core.hooks import EvictionReason, Tier
from sagellm.core.host import PluginHost
from sagellm.core.schedule_lines import step_line
from sagellm.engines.lmdeploy.branches import Branches
from sagellm.engines.lmdeploy.comm_choice import ARGUMENTS
from sagellm.engines.lmdeploy.grammars import Grammars
from sagellm.engines.lmdeploy.handle import Handle
from sagellm.engines.lmdeploy.host_memory import SwapTimes, cache_engine_of, copies_at_once, with_copies
from sagellm.engines.lmdeploy.kv_manager import BUILT_IN, KVManager
from sagellm.engines.lmdeploy.lines import arrive_line, end_line, open_line
from sagellm.engines.lmdeploy.prefix import PrefixHooks
from sagellm.engines.lmdeploy.prefix_cache import PrefixCache, namespace_of, num_shareable
from sagellm.engines.lmdeploy.requests import note_tokens, release_caller, service_of
from sagellm.engines.lmdeploy.step_choice import StepChoice
from sagellm.engines.lmdeploy.steps import Steps

logger = logging.getLogger("sagellm")

_seq_id = attrgetter("seq_id")

LONGEST_SILENCE_S = 0.02  # about a round of 16 quick steps
PREFIX_INDEX = "prefix index"  # its name among the faults of plug-ins


class SchedulerHooks:
    """Connects the hooks of the PyTorch engine with the plug-ins that `spec` (the JSON of a `HookConfig`) names."""

    def __init__(self, scheduler: Any, spec: str) -> None:
        self._scheduler = scheduler
        self._config = HookConfig.model_validate_json(spec)
        self._host = PluginHost(self._config)
        self._recorder = self._host.recorder
        self.cache = PrefixCache(scheduler, has_router=self._config.pd is not None)
        self.kv = KVManager(scheduler, self._host, self.cache, self._config.block_bytes)
        self.prefix = PrefixHooks(self._host, self.kv, self.cache, self._num_whole)
        self.choice = StepChoice(
            scheduler, self._host, self.kv.num_free, self._config.hold_limit_s, self.comm_backends
        )
        for name in ("order_waiting", "order_running", "over_budget", "released", "holds_all"):
            setattr(self, name, getattr(self.choice, name))
        self.branches = Branches(
            scheduler, self.cache, partial(self.lookup_prefix, None), lambda: self.prefix.num_fresh,
            partial(self._recorder.write, "fork"),
        )  # fmt: skip
        self._times_tokens = self._host.decides("schedule")  # the owner is told when each request got its tokens
        self._num_preempted = 0
        self._num_workers = 1
        self._comm_backends: dict[str, tuple[str, ...]] | None = None  # once somebody has asked
        self._rules: tuple[CommRule, ...] = ()  # of the step that was sent last
        self.speculation: Any = None  # where a strategy guesses tokens
        self._sparse: Any = None  # where a policy chooses the blocks that steps read
        self._drops: Any = None  # where it gives blocks up
        self.grammars = Grammars(None)
        self._ahead: Any = None  # where steps run ahead of their decision
        self.pd: Any = None  # where the engine is one of a prefill/decode group, or tells what it has cached
        self.tick = self.cache.tick
        scheduler.block_manager.allocator.sage = self
        scheduler.block_trie.sage = self
        self._is_told = bool(self._host.plugins) or self._recorder.enabled  # somebody wants to know what a step was
        self._steps = Steps(self._config.block_bytes)
        if self._recorder.enabled:
            self._recorder.write("open", **open_line(scheduler, self._config, self.cache.enabled))
        self._host.attach(lambda guard: Handle(self.kv, guard, self._recorder, self, self._config.layout))

    def bind_speculation(self, engine: Any) -> None:
        """The engine is built, and a strategy guesses tokens."""
        from sagellm.engines.lmdeploy.speculative.attach import Speculation

        try:
            self.speculation = Speculation(engine)
        except SageError as error:
            self._host.refuse(str(error))
            raise

    def take_part(self, engine: Any) -> Any:
        """The engine is built; what takes the place of its connections if it is one of a prefill/decode group, else None."""
        if self._config.pd is None:
            return None
        try:
            if self._config.pd.role is None:
                from sagellm.engines.lmdeploy.pd.followed import FollowedEngine

                self.pd = FollowedEngine(engine, self._config, self._host)
                return None
            from sagellm.engines.lmdeploy.pd.attach import PrefillDecode

            self.pd = PrefillDecode(engine, self._config, self._host)
        except SageError as error:
            self._host.refuse(str(error))
            raise
        return self.pd

    def bind(self, executor: Any) -> None:
        """The engine is built."""
        self._num_workers = executor.world_size
        if self._config.run_dir is not None:  # the process is a server's, and as `sagellm.serve.server` it ends sooner
            atexit.register(gc.freeze)
        self.kv.cache_engine = engine = cache_engine_of(executor)
        self.grammars = Grammars(executor)
        self.branches.may_copy = executor.specdecode_config is None  # else a second cache has blocks of the same numbers
        if self._config.sparsity is not None:
            self._bind_sparsity(getattr(executor, "model_agent", None))
        config = self._scheduler.cache_config
        if (agent := getattr(executor, "model_agent", None)) is not None and config.device_type == "cpu":
            self._run_ahead(agent)
        # Only plug-ins move blocks.
        if config.num_cpu_blocks and self._is_told and engine is not None and copies_at_once(engine, config.device_type):
            self._steps.swap_times = SwapTimes(engine)

    def _run_ahead(self, agent: Any) -> None:
        """Let the agent of this process run steps ahead.

        Not where another engine may write into a block that was freed. Nor where a step has a memory of its own: of guesses, or
        of the keys that a sparse policy wants to know about.
        """
        is_member = self._config.pd is not None and self._config.pd.role is not None
        if not is_member and self._config.sparsity is None and self._config.speculative is None:
            from sagellm.engines.lmdeploy.cpu.run_ahead import RunAhead

            agent.sage_ahead = self._ahead = RunAhead(self._scheduler.has_waiting)

    def _bind_sparsity(self, agent: Any) -> None:
        from sagellm.engines.lmdeploy.sparsity import steps_of

        config = self._scheduler.cache_config if agent is None else agent.cache_config
        self._sparse = steps_of(config)
        try:
            if agent is not None:  # that of workers was checked before they loaded the model
                self._sparse.check()
        except SageError as error:
            self._host.refuse(str(error))
            raise
        if self._recorder.enabled:
            self._sparse.readings = deque()
        if self._sparse.policy.drops:
            from sagellm.engines.lmdeploy.block_drops import BlockDrops

            note = partial(self._recorder.write, "drop")
            self.prefix.num_fresh = max(1, self._sparse.policy.observed)  # queries that are not computed look at nothing
            self._drops = BlockDrops(self._scheduler, self._sparse, self.cache, self.kv, note)

    def tokens_of(self, request_id: int) -> tuple[np.ndarray, str]:
        """(int64 [n], namespace) of a request; of its tokens those that others may share. Raises PluginError: unknown."""
        seq = self._sequence(request_id)
        return np.array(seq.valid_ids[: num_shareable(seq)], np.int64), namespace_of(seq)

    def blocks_of(self, request_id: int) -> tuple[int, ...]:
        """Raises PluginError: unknown."""
        return tuple(self._sequence(request_id).logical_blocks.get_real_blocks().tolist())

    def transfer_of(self, request_id: int) -> str:
        """Raises PluginError: unknown."""
        return getattr(self._sequence(request_id), "sage_transfer", "")

    def checks_drafts(self) -> bool:
        return self.speculation is not None

    def comm_backends(self) -> dict[str, tuple[str, ...]]:
        """As `EngineHandle.comm_backends`."""
        if self._comm_backends is None:
            workers = _worker_reports(self._config)
            told = workers[0]["comm_backends"] if workers else dict.fromkeys(ARGUMENTS, (GROUP,))
            self._comm_backends = {name: tuple(each) for name, each in told.items()} if self._num_workers > 1 else {}
        return self._comm_backends

    def _sequence(self, request_id: int) -> Any:
        session = self._scheduler.sessions.get(request_id)
        if session is None or not session.sequences:
            raise PluginError(f"request {request_id} is unknown; it has ended, or never came.")
        return next(iter(session.sequences.values()))

    def _num_whole(self, seq: Any) -> int:
        """How many of a request's first blocks hold the beginning of its text without a gap."""
        return seq.num_blocks if self._drops is None else self._drops.num_whole(seq)

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
        self.choice.chunks.forget(seq)
        self.branches.lost_blocks(seq)
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
        if self.pd is not None:
            self.pd.queue_changed()
        self._recorder.write("preempt", request=seq.session_id, tokens=seq.num_valid_ids)

    def dispatch(self, running: list[Any], num_loops: int) -> tuple[dict[int, int], dict[int, int]]:
        """A step, or a round of `num_loops` decode steps, is about to be sent; returns the copies to make before it."""
        is_decoding, seq_ids = self.choice.is_decoding, list(map(_seq_id, running))
        computed: tuple[tuple[int, int], ...] = ()
        num_before, refused = 0, ()
        if self._is_told:
            computed = tuple([(seq.session_id, 1 if is_decoding else seq.num_token_ids) for seq in running])
            num_before = sum([seq.num_history_ids for seq in running])
            refused = tuple(self.choice.chunks.refused)
            self._free_forsaken()
        number, ins, outs = self.kv.take_swaps()
        sent_s = time.perf_counter()
        self._steps.sent((
            self.choice.sent(), is_decoding, seq_ids, computed, refused, num_before, num_loops, sent_s,
            number, len(ins), len(outs),
        ))  # fmt: skip
        rules = self.choice.rules
        news, self._rules = None if rules == self._rules else rules, rules
        return with_copies(ins, self.branches.take_copies(), news), outs

    def _free_forsaken(self) -> None:
        """Blocks that a plug-in reserved before it was switched off."""
        for blocks in (self.kv.host_blocks, self.kv.pool):
            for name in blocks.owners():
                if not self._host.guards[name].healthy:
                    blocks.free_all_of(name)

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

    def publish(self, seqs: list[Any]) -> None:
        """Keys and values of these requests have come from elsewhere."""
        if self.cache.enabled:
            try:
                self.prefix.publish(seqs)
            except Exception as error:
                self._index_failed("extend", error)

    def back_to_cached(self, seq: Any) -> None:
        """A request gives up the blocks that it does not share with the prefix cache: nothing is in them."""
        num_held = self.cache.num_held(seq)
        self.cache.undo(seq, num_held, num_held * seq.block_size)

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
        service_of(seq)  # a deadline is put on this process's clock as soon as it is here
        if self.pd is not None:
            self.pd.queue_changed()
        if self._recorder.enabled:
            self._recorder.write("arrive", **arrive_line(seq))
        self.branches.arrived(seq)

    def choose_phase(self, prefill: bool) -> bool:
        self.branches.share()
        return self.choice.choose_phase(prefill)

    def cut(self, seq: Any, running: list[Any]) -> None:
        self.branches.joins(seq)
        self.choice.cut(seq, running)

    async def wait_for_plugins(self, may_run: Any) -> bool:
        """Nothing may run now. Whether it was waited for what keeps requests back; otherwise LMDeploy waits for a while."""
        if await self.choice.wait_for_plugins(may_run):
            return True
        return self.pd is not None and await self.pd.wait_for_room(may_run)

    async def wait_for_round(self, may_speak: Any) -> None:
        """Wait until LMDeploy lets answers out and new requests in, but not for long.

        It does so once a round of steps is launched and before half of its tokens are there. Where a GPU computes as fast as
        steps are launched, that never happens: the whole answer would come at its end, and new requests would wait for it.
        """
        if not may_speak.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(may_speak.wait(), LONGEST_SILENCE_S)

    def end_chunks(self, running: list[Any]) -> None:
        """A step has ended, and LMDeploy is about to look at what it sampled."""
        self.choice.chunks.send_back(running)

    def step_end(self, running: list[Any], is_decoding: bool) -> None:
        cut = self.choice.chunks.settle(running)
        ended = self._steps.ended(list(map(_seq_id, running)), is_decoding)
        if self._sparse is not None:
            self._sparse.hear(vars(running[0]).pop("sage_sparse", None))
        if self._drops is None:
            self.publish(running)
        else:  # what a prompt gives up is not published
            whole = [seq for seq in running if seq.seq_id not in cut]
            if not is_decoding or (ended is not None and ended[1] == ended[0][6] - 1):
                self._drops.step_end(whole, is_decoding)
            self.publish(whole)
        self.branches.queue()
        if self.pd is not None:
            self.pd.step_end(running, ended[3] if ended is not None else 0.0)
        if ended is None:
            return
        step, loop, end_s, duration_s = ended
        self.kv.host_blocks.ended(step[8])
        if self.speculation is not None and loop == step[6] - 1:
            self.speculation.give_back(running)
        if not self._is_told:
            return
        if self._times_tokens:
            note_tokens(running, cut, end_s)
        result = self._steps.result(step, loop, len(running), end_s, duration_s)
        if result.swap_s:
            self.kv.pool.note_copies(result.bytes_in, result.bytes_out, result.swap_s)
        if self.speculation is not None and is_decoding:
            result = self.speculation.told(result, running)
        if self._recorder.enabled:
            self.choice.note_unsent()
            for line in () if self._sparse is None else self._sparse.take_readings():
                self._recorder.write("read", **line)
            self._recorder.write("step", **step_line(result))
        if not (self._host.plugins and self._host.listens("on_step_end")):
            return
        self._host.post("on_step_end", result)
        if not self._scheduler.sessions:  # everyone has left; no step may follow for long
            self._host.flush()

    def ended(self, session_id: int) -> None:
        self.choice.note_unsent()
        if self.pd is not None:
            self.pd.ended(session_id)
        self.branches.ended(session_id)
        session = self._scheduler.sessions[session_id]
        for seq in session.sequences.values():
            release_caller(seq)
            if self._host.plugins:
                self.choice.ended(seq)
            if self._drops is not None:
                self._drops.forget(seq)
            if self.cache.enabled:
                try:
                    self.prefix.ended(seq)
                except Exception as error:
                    self._index_failed("unlock", error)
        if self._recorder.enabled:
            self._recorder.write("end", **end_line(session_id, list(session.sequences.values())))
        if not self._host.plugins:
            return
        self.kv.ending = session
        self._host.notify("on_request_end", session_id)
        self.kv.ending = None
        self._host.flush()  # it may have been the last one for long

    # ---- requests of the server and of the process that owns the engine

    def exchange_policy(self, tier: str, policy: str, options: dict[str, Any]) -> str:
        """As `PluginHost.exchange_policy`."""
        if tier not in [each.value for each in Tier]:
            raise PolicyError(f"tier {tier!r}: allowed are {', '.join(each.value for each in Tier)}.")
        return self._host.exchange_policy(Tier(tier), policy, options)

    def command(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request that the server sent to the engine process: {"result": ...} or {"error": message}."""
        try:
            commands = {"exchange_policy": self.exchange_policy, "compile_ahead": self.grammars.compile_ahead}
            return {"result": commands[name](**arguments)}
        except SageError as error:
            return {"error": str(error)}

    # ---- report

    @property
    def step_s(self) -> float:
        """Wall-clock seconds with a step running, so far."""
        return self._steps.seconds

    def report(self) -> dict[str, Any]:
        """Return the numbers of `/metrics`; picklable."""
        workers = _worker_reports(self._config)
        own = self._host.report()
        return {
            "blocks": self.kv.counts()._asdict(),
            "evicted": {reason.value: number for reason, number in self.kv.evicted.items()},
            "migrated": {tier.value: number for tier, number in self.kv.migrated.items()},
            "pool": self.kv.pool.report(),
            "preempted": self._num_preempted,
            "chunks": self.choice.chunks.num_cut,
            "ahead": None if self._ahead is None else {"used": self._ahead.used, "wasted": self._ahead.wasted},
            "forks": self.branches.report(),
            "prefix": asdict(self.prefix.first),
            "prefix_retries": asdict(self.prefix.retries),
            "prefix_index": self.cache.metrics(),
            "step_s": self.step_s,
            "grammars": self.grammars.num_compiled,
            "speculation": None if self.speculation is None else self.speculation.report(),
            "sparsity": None if self._sparse is None else self._sparse.report() | {
                "dropped": None if self._drops is None else self._drops.num_dropped
            },
            "pd": None if self.pd is None else self.pd.report(),
            "plugins": self._host.plugin_reports(),
            "comm": [row for worker in workers for row in worker["comm"]],
            "comm_choice": workers[0]["comm_choice"] if workers else None,
            "calls": own["calls"] + [row for worker in workers for row in worker["calls"]],
            "faults": own["faults"] + [row for worker in workers for row in worker["faults"]],
            "enabled": {
                name: on and all(worker["enabled"].get(name, True) for worker in workers)
                for name, on in own["enabled"].items()
            },
        }

    def close(self) -> None:
        if self.pd is not None:
            self.pd.engine_closes()
        self.choice.note_unsent()
        self.grammars.close()
        self._host.close()


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
