"""LMDeploy's scheduler and our hooks, whole, over a device that computes nothing but remembers what each slot holds.

Instead of keys and values a slot keeps, for each token, a number that stands for the adapter and all tokens up to it. A
forward pass checks every number that it would read. The loop is that of LMDeploy's engine: the next step may be sent while
one is on its way, decode steps go in rounds, and anything may happen to a request meanwhile.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from sagellm.core.config import HookConfig, PluginSpec

BLOCK = 4
VOCABULARY = 3


def identities(adapter: str | None, tokens: Sequence[int]) -> list[int]:
    """For each token a number of everything up to it, equal in every process."""
    found, state = [], crc32((adapter or "").encode())
    for token in tokens:
        state = hash((state, int(token)))
        found.append(state)
    return found


class SimulatedDevice:
    def __init__(self, pool_slots: int, host_slots: int) -> None:
        self.pool = np.zeros((pool_slots, BLOCK), np.int64)
        self.host = np.zeros((host_slots, BLOCK), np.int64)

    def swap(self, ins: dict[int, int], outs: dict[int, int]) -> None:
        for slot, to in outs.items():
            self.host[to] = self.pool[slot]
        for slot, to in ins.items():
            self.pool[to] = self.host[slot]

    def forward(self, row: SimpleNamespace) -> int:
        """Read what came before, write the row's own tokens, return the next one."""
        assert row.num_done < len(row.tokens), "there is nothing to sample from"
        numbers = identities(row.adapter, row.tokens)
        slots = self.pool[row.table]
        before = slots.reshape(-1)[: row.num_done].tolist()
        assert before == numbers[: row.num_done], f"sequence {row.seq.seq_id} reads what is not its own"
        for position in range(row.num_done, len(numbers)):
            self.pool[row.table[position // BLOCK], position % BLOCK] = numbers[position]
        return numbers[-1] % VOCABULARY


class SimulatedEngine:
    """`events()` is called wherever LMDeploy's loop gives way to messages of clients."""

    def __init__(
        self, *plugins: str | PluginSpec, pool: int = 12, host: int = 0, decode_round: int = 1, max_batches: int = 4, **config
    ) -> None:  # fmt: skip
        from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
        from lmdeploy.pytorch.messages import SequenceMeta
        from lmdeploy.pytorch.paging.scheduler import Scheduler
        from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

        specs = tuple(PluginSpec(name=p) if isinstance(p, str) else p for p in plugins)
        cache = CacheConfig(
            max_batches=max_batches, block_size=BLOCK, num_cpu_blocks=host, num_gpu_blocks=pool,
            enable_prefix_caching=True, sage=HookConfig(plugins=specs, **config).model_dump_json(),
        )  # fmt: skip
        self.strategy = ARSequenceStrategy()
        self.scheduler = Scheduler(
            SchedulerConfig(max_batches, 10**6, prefill_interval=decode_round), cache, SequenceMeta(BLOCK, self.strategy)
        )
        self.hooks = self.scheduler.sage
        self.device = SimulatedDevice(pool, host)
        self.decode_round = decode_round
        self.next_step: SimpleNamespace | None = None
        self.events = lambda: None
        self._num_sessions = 0

    # ---- what clients do

    def add(self, tokens: Sequence[int], num_new: int = 4, adapter: str | None = None, **inputs: Any) -> int:
        """A new session with one request; returns its id."""
        from lmdeploy.pytorch.messages import SamplingParam

        session_id, self._num_sessions = self._num_sessions, self._num_sessions + 1
        session = self.scheduler.add_session(session_id)
        settings = SamplingParam(max_new_tokens=num_new)
        seq = session.add_sequence(np.array(tokens), sampling_param=settings, adapter_name=adapter, **inputs)
        self.scheduler.add_sequence(seq)
        return session_id

    def go_on(self, session_id: int, tokens: Sequence[int]) -> None:
        """The next turn of a session whose request was stopped or is done."""
        from lmdeploy.pytorch.messages import MessageStatus

        seq = self.seq(session_id)
        seq.update_token_ids(np.array(tokens))
        seq.status = MessageStatus.WAITING

    def stop(self, session_id: int) -> None:
        self.scheduler.stop_session(session_id)

    def end(self, session_id: int) -> None:
        self.scheduler.end_session(session_id)

    def seq(self, session_id: int) -> Any:
        return next(iter(self.scheduler.sessions[session_id].sequences.values()))

    def run(self, tokens: Sequence[int], num_new: int = 4, adapter: str | None = None) -> list[int]:
        """One request from its arrival to its end; the tokens it generated."""
        session_id = self.add(tokens, num_new, adapter)
        seq = self.seq(session_id)
        self.until_idle()
        self.end(session_id)
        return seq.generated_ids.tolist()

    # ---- LMDeploy's loop

    def until_idle(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def step(self) -> bool:
        """One step or round; False if there was nothing to do."""
        step, self.next_step = self.next_step or self._send(self._wants_prefill()), None
        if step is None:
            return False
        self.scheduler.lock_running(step.running)
        for loop in range(step.num_loops):
            self.events()
            if loop == step.num_loops - 1 and (self._wants_prefill() or self.scheduler.has_running()):
                self.next_step = self._send(self._wants_prefill())
                self.events()
            self._finish(step, loop)
        self.scheduler.unlock_running(step.running)
        self.events()
        return True

    def _wants_prefill(self) -> bool:
        return self.scheduler.has_waiting()

    def _send(self, is_prefill: bool) -> SimpleNamespace | None:
        scheduler = self.scheduler
        for prefill in (True, False) if is_prefill else (False,):
            if not prefill and not scheduler.has_running():
                continue
            running = scheduler.schedule(prefill, 0 if prefill else self.decode_round).running
            if running:
                num_loops = 1 if prefill else self.decode_round
                ins, outs = self.hooks.dispatch(running, num_loops)
                rows = [self._row(seq) for seq in running]
                return SimpleNamespace(
                    running=running, rows=rows, ins=ins, outs=outs, num_loops=num_loops, is_decoding=not prefill
                )
        return None

    def _row(self, seq: Any) -> SimpleNamespace:
        """Return the row of a sequence that travels to the device with a step."""
        table = self.scheduler.block_manager.get_block_table(seq).tolist()
        written = seq.logical_blocks[seq.num_history_ids // BLOCK :]
        references = self.scheduler.block_manager.allocator.get_ref_count(written)
        assert (references == 1).all(), f"sequence {seq.seq_id} is to write where others read"
        tokens = seq.all_ids.tolist()
        num_left = seq.sampling_param.max_new_tokens - seq.num_new_tokens
        return SimpleNamespace(
            seq=seq, table=table, tokens=tokens, num_done=seq.num_history_ids, adapter=seq.adapter_name, num_left=num_left
        )

    def _finish(self, step: SimpleNamespace, loop: int) -> None:
        """The output of one loop of a step arrives."""
        if loop == 0:
            self.device.swap(step.ins, step.outs)
        tokens = []
        for row in step.rows:
            tokens.append(self.device.forward(row))
            row.num_done = len(row.tokens)
            row.tokens.append(tokens[-1])
            row.num_left -= 1
        outputs = SimpleNamespace(
            next_token_ids=torch.tensor(tokens), stopped=torch.tensor([row.num_left <= 0 for row in step.rows]),
            model_metas=None, all_routed_experts=None,
        )  # fmt: skip
        self.strategy.update_running(step.running, outputs, step.is_decoding)
        self.hooks.step_end(step.running, step.is_decoding)
