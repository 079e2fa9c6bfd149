"""TurboMind's hook table, wired to plug-ins: the other side of `sage_hooks.h`, to the contract of `core/hooks.py`.

The native index looks up and stores prefixes and chooses victims, on the engine's threads and without Python. A port carries
the questions for plug-ins: a thread here takes the question, lets the plug-in answer it, and hands the answer back. The
engine waits for at most the time limit. The ranks of a group are asked once. That thread waits for answers alone, never for
one who listens: what a plug-in is told it hears on its own thread, when it gets to it.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sagellm._core import HookTable, PluginPort
from sagellm.core.answers import check_victims
from sagellm.core.config import HookConfig
from sagellm.core.errors import ConfigError, PluginError
from sagellm.core.events import FORMAT, Recorder
from sagellm.core.guard import PluginFault
from sagellm.core.hooks import (
    CommOp,
    EvictionNotice,
    EvictionReason,
    Phase,
    Plugin,
    PrefixMatch,
    PrefixUpdate,
    StepResult,
    VictimRequest,
    overrides,
)
from sagellm.core.host import PluginHost
from sagellm.engines.lmdeploy.comm_stats import CommStats
from sagellm.engines.lmdeploy.turbomind_handle import Handle
from sagellm.engines.lmdeploy.turbomind_steps import StepDecisions, Where

logger = logging.getLogger("sagellm")

ADAPTER = "TurboMind adapter"  # its name among the faults of plug-ins
INDEX = "native index"
INDEX_ORDER = "remains of ended requests first, then least recently used"

# The port's limit is what the engine waits for; a plug-in gets most of it, the rest is for handing the default back. One that
# came late to its question, after what it was told before, is given up in between: so it is seen first whether it overran.
PLUGIN_SHARE = 0.9
ANSWER_SHARE = 0.95

POLL_S = 60.0
MAX_LOOKED_UP = 65536  # requests whose misses were told

COMM_OPS = {
    1: "all_reduce", 2: "all_gather", 3: "reduce_scatter", 4: "all_reduce_rmsnorm", 5: "all_reduce_rmsnorm_ex",
    6: "all_gather_2d", 7: "broadcast",
}  # fmt: skip

IMPOSSIBLE = {
    "lookup_prefix": "TurboMind's lookups are answered by the native index, on the engine's threads",
    "on_prefix_released": "TurboMind does not tell when a request lets go of its cached blocks",
    "on_request_end": "TurboMind does not tell when a request has ended",
    "comm_decide": "TurboMind does its collectives by the communicator that it made at the start",
    "comm_begin": "TurboMind's collectives are told after they were enqueued; use comm_end, whose op has a duration_s",
}

QUESTIONS = {"select_victims": "select_victims", "schedule": "schedule", "admit": "admit"}  # topic -> decision
NOTICES = {
    "evicted": "on_evicted", "matched": "on_prefix_matched", "stored": "on_prefix_stored", "step_end": "on_step_end",
    "collective": "comm_end",
}  # fmt: skip


def refuse_impossible(plugins: Iterable[tuple[str, Plugin]]) -> None:
    """Raises ConfigError for a plug-in with a hook that TurboMind cannot call."""
    for name, plugin in plugins:
        for hook, reason in IMPOSSIBLE.items():
            if overrides(plugin, hook):
                raise ConfigError(f"plug-in {name} has {hook}: {reason}. Leave it out, or use --engine pytorch.")


class TurboMindHooks:
    """The table of one process, and the plug-ins behind it. Make it before the engine, and install `table.capsule()`.

    Raises:
        ConfigError, PluginError: at construction, for a plug-in that cannot be built or that asks for what TurboMind cannot do.
    """

    def __init__(self, config: HookConfig, block_size: int, prefix_caching: bool = True) -> None:
        self._host = PluginHost(config.model_copy(update={"time_limit_s": config.time_limit_s * PLUGIN_SHARE}))
        refuse_impossible(self._host.plugins)
        self._config = config
        self._prefix_caching = prefix_caching
        self.block_size = block_size
        self._steps = StepDecisions(self._host, config)
        self._callbacks: list[tuple[str, Callable[[EvictionNotice], None]]] = []
        self.question: Any = None  # the one that a plug-in answers now
        self._chosen: dict[Where, tuple[str, str, dict[str, int], dict[int, str]]] = {}
        self._looked_up: dict[int, None] = {}
        self._num_faults = 0
        self._is_told: bool | None = None  # whether evictions are; None until it is settled
        self._comm = CommStats()
        self._host.recorder.write(
            "open", format=FORMAT, engine="lmdeploy.turbomind", block_size=block_size, block_bytes=config.block_bytes,
            prefix_caching=prefix_caching, plugins=[spec.model_dump(mode="json") for spec in config.plugins],
        )  # fmt: skip
        self._host.attach(lambda guard: Handle(self, guard, config.block_bytes))
        topics = self._topics()
        self._is_told = "evicted" in topics
        self.port = PluginPort(config.time_limit_s, topics)
        self.table = HookTable(
            self.port if topics else None, prefix=prefix_caching, schedule="schedule" in topics, admit="admit" in topics,
            step_end="step_end" in topics, comm="collective" in topics, time_comm="collective" in topics,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="sagellm-port", daemon=True)
        if topics:
            self._thread.start()

    @property
    def recorder(self) -> Recorder:
        return self._host.recorder

    def add_callback(self, name: str, callback: Callable[[EvictionNotice], None]) -> None:
        """Raises PluginError when it is too late: the engine tells what was asked for before it was made."""
        if self._is_told is False:
            raise PluginError("on TurboMind an eviction callback is registered in `attach`.")
        self._callbacks.append((name, callback))

    def _topics(self) -> list[str]:
        """Hooks that a plug-in listens to or decides."""
        wanted = [topic for topic, hook in QUESTIONS.items() if self._host.decides(hook)]
        healthy = {name for name, guard in self._host.guards.items() if guard.healthy}
        for topic, hook in NOTICES.items():
            listens = any(name in healthy for name, _ in self._host.listeners(hook))
            listens |= topic == "evicted" and any(name in healthy for name, _ in self._callbacks)
            listens |= topic == "collective" and self._config.comm_metrics
            # Without prefix caching what the engine tells as evicted are the blocks of every request that ends.
            is_real = topic != "evicted" or self._prefix_caching
            if is_real and (listens or self._host.recorder.enabled):
                wanted.append(topic)
        return wanted

    # ---- the thread that answers

    def _serve(self) -> None:
        wait_s = POLL_S
        try:
            while (delivery := self.port.next(wait_s)) is not None:
                until_s = time.monotonic() + self._config.time_limit_s * ANSWER_SHARE
                notices, question = delivery
                for notice in notices:
                    self._told(notice)
                if question is not None:
                    self._answer(question, until_s)
                wait_s = min(POLL_S, self._host.hand_over())
                self._drop_unwanted()
                del delivery, notices, question
        except Exception:
            self.port.fail(ADAPTER, "raised", traceback.format_exc().rstrip())
        self._report_port_fault()

    def _drop_unwanted(self) -> None:
        """Once a plug-in is off, the engine need not wait for it, nor tell what only it wanted to know."""
        if len(self._host.faults) != self._num_faults:
            self._num_faults = len(self._host.faults)
            self.port.leave(sorted(set(self.port.topics) - set(self._topics())))

    def _report_port_fault(self) -> None:
        """The port is off although each plug-in kept to its own limit, or because this adapter failed.

        A plug-in that made it overrun has been found by its own guard; if none has, then none was running its question for
        longer than it may. Nonsense is the answer of the decision's owner.
        """
        if self.port.fault is None:
            return
        self._host.hand_over()
        hook, kind, detail = self.port.fault
        logger.error("the engine asks and tells no plug-in any more: %s in %s.\n%s", kind, hook, detail)
        decision = QUESTIONS.get(hook)
        if kind == "nonsense" and decision is not None and self._host.decides(decision):
            self._host.blame(decision, detail, kind)
        elif not any(fault.hook == decision for fault in self._host.faults):
            self._host.faults.append(PluginFault(ADAPTER, hook, kind, detail))
            self._host.recorder.write("fault", plugin=ADAPTER, hook=hook, kind=kind, detail=detail.splitlines()[-1])

    def _answer(self, question: Any, until_s: float) -> None:
        self.question = question
        try:
            if question.topic == "select_victims":
                self.port.answer(question.number, chosen=self._select_victims(question, until_s))
            elif question.topic == "admit":
                self.port.answer(question.number, chosen=self._steps.admit(question, until_s))
            else:
                priorities, budget = self._steps.schedule(question, until_s) or (None, 0)
                self.port.answer(question.number, priorities=priorities, budget=budget)
        finally:
            self.question = None

    def _select_victims(self, question: Any, until_s: float) -> list[int] | None:
        ids = question.ids
        accesses = question.timestamps if len(question.timestamps) else np.zeros(len(ids))
        request = VictimRequest(
            question.count,
            *(_read_only(column, np.int64) for column in (ids, question.parents, accesses, question.depths)),
            on_device=_read_only(np.ones(len(ids)), np.bool_),
        )
        decided = self._host.decide("select_victims", request, lambda answer: check_victims(answer, request), until_s)
        if decided is None:
            return None
        name, decision = decided
        victims = list(decision.victims)[: question.count]
        counts = {"requested": question.count, "candidates": len(ids)}
        reasons = decision.reasons or [""] * len(decision.victims)
        reason_of = dict(zip(victims, reasons, strict=False))
        self._chosen[question.engine, question.group] = name, decision.reason, counts, reason_of
        return victims

    # ---- notices

    def _told(self, notice: Any) -> None:
        getattr(self, f"_on_{notice.topic}")(notice)

    def _on_evicted(self, notice: Any) -> None:
        ids = notice.ids.tolist()
        if self._host.recorder.enabled:
            self._record_victims((notice.engine, notice.group), ids)
        told = EvictionNotice(tuple(ids), EvictionReason.PREFIX)
        self._host.post("on_evicted", told)
        for name, callback in self._callbacks:
            self._host.guards[name].post("eviction_callback", callback, told)

    def _record_victims(self, where: Where, ids: list[int]) -> None:
        name, reason, counts, chosen = self._chosen.pop(where, ("", "", {}, {}))
        of_plugin = [block for block in ids if block in chosen]
        others = [block for block in ids if block not in chosen]
        if of_plugin:
            each = {"reasons": [chosen[block] for block in of_plugin]} if any(chosen.values()) else {}
            self._host.recorder.write("evict", policy=name, reason=reason, **counts, victims=of_plugin, **each)
        if others:
            self._host.recorder.write("evict", policy=INDEX, reason=INDEX_ORDER, victims=others)

    def _on_matched(self, notice: Any) -> None:
        """A waiting request is looked up in every round; its misses are told once."""
        request, ids = notice.seq_id, notice.ids.tolist()
        is_first = request not in self._looked_up
        if not is_first and not ids:
            return
        self._looked_up[request] = None
        if len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]
        num_matched = notice.num_blocks * self.block_size
        self._host.recorder.write(
            "lookup", request=request, tokens=notice.num_tokens, matched=num_matched, blocks=ids, source=INDEX, first=is_first
        )
        match = PrefixMatch(
            request, notice.num_tokens, num_matched, tuple(ids), INDEX, first=is_first, time_s=notice.time_ns / 1e9
        )
        self._host.post("on_prefix_matched", match)

    def _on_stored(self, notice: Any) -> None:
        ids = notice.ids.tolist()
        self._host.recorder.write("store", request=notice.seq_id, first_token=notice.first_token, blocks=ids)
        tokens = _read_only(notice.tokens, np.int64)
        update = PrefixUpdate(
            notice.seq_id, "", notice.first_token, tokens, tuple(ids), time_s=notice.time_ns / 1e9
        )
        self._host.post("on_prefix_stored", update)

    def _on_step_end(self, notice: Any) -> None:
        # A step that decodes computes one token a sequence; one with prompts in it nearly always more.
        phase = Phase.PREFILL if notice.step_tokens > notice.step_sequences else Phase.DECODE
        refused = self._steps.refused((notice.engine, notice.group), notice.step)
        result = StepResult(
            notice.step, phase, notice.step_sequences, notice.step_tokens, notice.time_ns / 1e9, refused=refused
        )
        self._host.post("on_step_end", result)

    def _on_collective(self, notice: Any) -> None:
        name = COMM_OPS.get(notice.comm_op, f"op {notice.comm_op}")
        duration_s = notice.milliseconds / 1e3 if notice.milliseconds >= 0 else None
        op = CommOp(name, notice.comm_bytes, "", notice.comm_rank, notice.comm_ranks, True, duration_s)
        if duration_s is not None:
            # On the stream of the computation, which waits for it: all of it is exposed.
            duration_ns = round(duration_s * 1e9)
            whole_bytes = op.num_bytes * (op.world_size if name.startswith("all_gather") else 1)
            self._comm.expose(op.rank, name, duration_ns)
            self._comm.add(op.rank, name, whole_bytes, op.world_size, duration_ns)
        self._host.recorder.write(
            "comm", op=name, bytes=op.num_bytes, rank=op.rank, world_size=op.world_size,
            duration_ns=None if duration_s is None else round(duration_s * 1e9),
        )  # fmt: skip
        for plugin_name, plugin in self._host.listeners("comm_end"):
            self._host.guards[plugin_name].post("comm_end", plugin.comm_end, op, None)

    # ---- report and end

    def report(self) -> dict[str, Any]:
        """Return the numbers of the hooks for `/metrics`, without the engine's own counts."""
        stats, own = self.table.stats(), self._host.report()
        tokens = {kind: stats[f"{kind}_tokens"] for kind in ("query", "hit")}
        lookups = {f"{kind}_tokens": count for kind, count in tokens.items()}
        lookups |= {f"{kind}_blocks": count // self.block_size for kind, count in tokens.items()}
        is_on = self.port.fault is None
        evicted = dict.fromkeys(EvictionReason, 0)
        if self._prefix_caching:
            evicted[EvictionReason.PREFIX] = stats["evicted_blocks"]
        port = self.port.stats()
        port["lost"] += sum(guard.num_lost for guard in self._host.guards.values())
        return {
            "evicted": {reason.value: number for reason, number in evicted.items()},
            "prefix": lookups,
            "plugins": self._host.plugin_reports(),
            "table": stats,
            "port": port,
            "comm": self._comm.report(),
            "calls": own["calls"],
            "faults": own["faults"],
            "enabled": {name: on and is_on for name, on in own["enabled"].items()},
        }

    def close(self) -> None:
        """The engine is gone, or goes on without plug-ins: its threads are answered at once from here on."""
        self.port.close()
        if self._thread.ident is not None:
            self._thread.join(self._config.time_limit_s * 2)
        self._host.close(self._config.time_limit_s)


def _read_only(column: np.ndarray, dtype: type) -> np.ndarray:
    copy = np.array(column, dtype)
    copy.flags.writeable = False
    return copy
