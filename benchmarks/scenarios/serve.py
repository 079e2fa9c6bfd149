"""The engine scenario: a real server driven over HTTP with streaming, one round at a time."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.config import BenchmarkConfig, Closed, Contestant, Workload
from benchmarks.errors import BenchmarkError, ServerDied
from benchmarks.load.arrivals import send_times
from benchmarks.load.plan import Plan, PlannedRequest
from benchmarks.load.prompts import Prompt, TextTokens, Tokens, allowed_ids, make_prompts, shared_tokens
from benchmarks.load.samples import Samples, read_samples
from benchmarks.metrics import compute, flops
from benchmarks.metrics.classes import class_metrics
from benchmarks.models.real_text import RealText
from benchmarks.result import Run
from benchmarks.server import Server

HITS_INTERVAL_S = 0.5
COMM_SETTLE_S = 1.2  # ranks publish what they counted every 0.2 s, those of older checkouts within a second
WARM_SHARE = 0.9  # of the tokens that a warm cache could hit
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Subject:
    """A server that is up, and what must be known of its model to load and to judge it."""

    contestant: Contestant
    server: Server
    facts: dict[str, Any]
    model: Path
    block_size: int
    devices: int
    peak_flops: float | None
    no_peak: str = ""


class ServeScenario:
    """Rounds of one workload. `name` is serve, or serve@N where a sweep sets the concurrency."""

    def __init__(self, config: BenchmarkConfig, workload: Workload, name: str, samples: Path, point: int = 0) -> None:
        """`point`: which of a sweep this is; each has prompts of its own, or the first would warm the cache for the rest."""
        self.name = name
        self._config = config
        self._workload = workload
        self._samples = samples
        self._point = point

    def run(self, subject: Subject, round_number: int, progress: Progress) -> Run:
        """One round. All contestants of a round get the same requests.

        Raises:
            ServerDied: the run is lost.
            BenchmarkError: a request that the server's context cannot hold.
            KeyboardInterrupt: after the client was stopped.
        """
        seed = self._config.seed * 1000 + round_number + 1_000_000 * self._point
        run = Run(contestant=subject.contestant.name, scenario=self.name, round=round_number, seed=seed)
        ids: Tokens = allowed_ids(_vocab_size(subject.model))
        if self._workload.content == "text":
            ids = TextTokens(_text_tokens(subject.model), ids)
        prompts = make_prompts(self._workload, seed, ids)
        self._check_lengths(subject, prompts)
        self._warm_up(subject, seed, ids, prompts, first=round_number % self._config.rounds == 0)
        subject.server.forget_peak_memory()
        before = self._counters(subject)
        file = self._samples / f"{run.contestant}-{self.name}-{round_number}.npz"
        with _watched_hits(subject.server, file.with_name(f"{file.stem}-hits.npz"), before):
            run.client = _drive(self._plan(subject, prompts, seed), file, subject.server, progress)
        after = self._counters(subject)
        samples = read_samples(file)
        run.samples = f"samples/{file.name}"
        self._measure(run, subject, samples, np.array([prompt.load_class for prompt in prompts]), before, after)
        run.metrics["peak_memory_bytes"] = float(subject.server.peak_memory_bytes())
        self._judge(run, subject, prompts, samples, before, after)
        return run

    def _counters(self, subject: Subject) -> dict[str, float]:
        if self._config.sage_config(subject.contestant).tensor_parallel > 1:
            time.sleep(COMM_SETTLE_S)
        return subject.server.metrics()

    def _check_lengths(self, subject: Subject, prompts: list[Prompt]) -> None:
        longest, context = max(len(prompt.ids) + prompt.max_tokens for prompt in prompts), subject.facts.get("context_length")
        if context and longest > context:
            raise BenchmarkError(
                f"a prompt and its answer take {longest} tokens; the server's context has {context}. Shorten them, scale the "
                "trace, or raise server.context_length"
            )

    def _warm_up(self, subject: Subject, seed: int, ids: Tokens, prompts: list[Prompt], first: bool) -> None:
        """On the first round of a launch requests of another seed, so that nothing of the round is cached; then, if asked
        for, the round's own prompts."""
        workload = self._workload
        count = max(2, workload.warmup_requests)
        others = make_prompts(workload.model_copy(update={"num_requests": count}), seed + 500_000_000, ids)
        sent = others[: workload.warmup_requests] if first else []
        if workload.cache == "warm":
            sent += [dataclasses.replace(prompt, max_tokens=2) for prompt in prompts]
        if sent:
            with tempfile.TemporaryDirectory() as folder:
                closed = workload.model_copy(update={"arrivals": Closed(concurrency=1)})
                plan = self._plan(subject, sent, seed, closed)
                _drive(plan, Path(folder) / "warm-up.npz", subject.server, lambda done, of: None)

    def _plan(self, subject: Subject, prompts: list[Prompt], seed: int, workload: Workload | None = None) -> Plan:
        asking = workload is None  # a warm-up asks the scheduler for nothing
        workload = workload or self._workload
        times = send_times(workload.arrivals, len(prompts), seed)
        as_text = _decoder(subject.model) if workload.endpoint != "generate" else None
        requests = [
            PlannedRequest(
                scheduled_s=None if times is None else float(times[number]),
                prompt_ids=None if as_text else prompt.ids,
                text=as_text(prompt.ids) if as_text else None,
                max_tokens=prompt.max_tokens,
                service=workload.classes[prompt.load_class].service if workload.classes and asking else None,
            )
            for number, prompt in enumerate(prompts)
        ]
        key = subject.server.api_key
        return Plan(
            url=subject.server.url,
            endpoint=workload.endpoint,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            model=subject.facts["model"],
            requests=requests,
            concurrency=workload.arrivals.concurrency if isinstance(workload.arrivals, Closed) else None,
        )

    def _measure(
        self, run: Run, subject: Subject, samples: Samples, load_class: np.ndarray,
        before: dict[str, float], after: dict[str, float],
    ) -> None:  # fmt: skip
        wall = compute.wall_s(samples)
        parallel = self._config.sage_config(subject.contestant).tensor_parallel
        try:
            parts = [
                compute.request_metrics(samples, self._config.slo),
                class_metrics(samples, load_class, self._workload.classes, self._config.slo),
                compute.counter_metrics(before, after, parallel),
                compute.cost_metrics(subject.devices, wall, compute.output_tokens(samples), self._config.price),
            ]
        except BenchmarkError as error:
            run.status, run.reason = "void", str(error)
            return
        for metrics, absent in parts:
            run.metrics |= metrics
            run.absent |= absent
        if subject.peak_flops is None or wall == 0:
            run.absent["mfu"] = subject.no_peak or "no answer, no time"
            return
        try:
            shape = flops.read_shape(subject.model)
        except BenchmarkError as error:
            run.absent["mfu"] = str(error)
            return
        spent = flops.round_flops(shape, samples, _delta(before, after, "tokens", "hit"))
        run.metrics["mfu"] = compute.mfu(spent, wall, subject.peak_flops, subject.devices)

    def _judge(
        self, run: Run, subject: Subject, prompts: list[Prompt], samples: Samples,
        before: dict[str, float], after: dict[str, float],
    ) -> None:  # fmt: skip
        """Void a run whose client was saturated, whose cache was not as declared, or without an answer."""
        if run.status == "valid" and not samples.ok.any():
            first = next((text for text in samples.errors.tolist() if text), "no error was told")
            run.status, run.reason = "failed", f"no request was answered: {first}"
        self._judge_cache(run, subject, prompts, samples, before, after)
        if run.status == "valid":
            self._judge_client(run)

    def _judge_client(self, run: Run) -> None:
        late, what, limit = run.client["lag_share"], "the gap between sends", self._config.client_lag_limit
        if isinstance(self._workload.arrivals, Closed):  # no schedule to be late for
            late, what = run.client["lag_mean_s"] / run.metrics["ttft_p50_s"], "the time to the first token"
        if late > limit:
            run.status, run.reason = "void", f"the client was late by {late:.1%} of {what}; allowed {limit:.0%}"
        elif run.client["cpu_share"] > self._config.client_cpu_limit:
            used, limit = run.client["cpu_share"], self._config.client_cpu_limit
            run.status, run.reason = "void", f"the client used {used:.0%} of a core; allowed {limit:.0%}"

    def _judge_cache(
        self, run: Run, subject: Subject, prompts: list[Prompt], samples: Samples,
        before: dict[str, float], after: dict[str, float],
    ) -> None:  # fmt: skip
        if compute.series("sagellm_prefix_tokens_total", kind="hit", admission="first") not in after:
            if run.status == "valid" and self._workload.cache == "warm":
                run.status, run.reason = "void", "the server counts no hits, so nothing proves that its cache was warm"
            return  # without a prefix cache it is cold; an older server's hit rates are absent, too
        hit, block = _delta(before, after, "tokens", "hit"), subject.block_size
        most = float(sum(shared_tokens([prompt.ids for prompt in prompts], block)))
        whole = float(sum(((samples.prompt_tokens - 1) // block * block)[samples.prompt_tokens > 0]))
        if self._workload.endpoint != "generate":
            # Text is cut into other tokens than it was made of, and a chat's template stands before it.
            longer = samples.prompt_tokens - np.array([len(prompt.ids) for prompt in prompts])
            most += float(np.maximum(longer, 0).sum() + block * len(prompts))
        run.cache = {"hit_tokens": hit, "cold_limit_tokens": most, "warm_limit_tokens": whole}
        if run.status != "valid":
            return
        if self._workload.cache == "cold" and hit > most:
            run.status = "void"
            run.reason = f"{hit:g} tokens hit the prefix cache; a cold one could have given {most:g}: it was contaminated"
        elif self._workload.cache == "warm" and hit < WARM_SHARE * whole:
            run.status = "void"
            run.reason = f"{hit:g} tokens hit the prefix cache; a warm one holds {whole:g}: the KV pool is too small"


def _drive(plan: Plan, out: Path, server: Server, progress: Progress) -> dict[str, float]:
    """Run the client process; returns its last line, what it says of its own lag. Raises ServerDied."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.write(file)
        client = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load.client", str(file), "--out", str(out)],
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            threading.Thread(target=_stop_with, args=(server, client), daemon=True).start()
            lag: dict[str, float] = {}
            for line in client.stdout:
                said = json.loads(line)
                if "done" in said:
                    progress(said["done"], said["of"])
                else:
                    lag = said
            code = client.wait()
        except BaseException:
            client.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(10)
            client.kill()
            raise
        finally:
            client.stdout.close()
    server.check()
    if code != 0 or not lag:
        raise BenchmarkError(f"the client process ended with code {code} and no account of itself")
    return lag


def _stop_with(server: Server, client: subprocess.Popen) -> None:
    """Stop the client once the server has ended."""
    while client.poll() is None:
        if server.process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                client.terminate()
            return
        time.sleep(0.2)


@contextlib.contextmanager
def _watched_hits(server: Server, file: Path, before: dict[str, float]) -> Any:
    """Write how the hit counters went, from start to end and twice a second, as they stand above `before`."""
    rows: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    start_s, stopped = time.perf_counter(), threading.Event()

    def watch() -> None:
        last = False
        while not last:
            last = stopped.wait(HITS_INTERVAL_S)
            try:
                now = server.metrics()
            except ServerDied:
                return
            counts = (_delta(before, now, "tokens", kind) for kind in ("query", "hit"))
            rows.append((time.perf_counter() - start_s, *counts))

    thread = threading.Thread(target=watch, daemon=True)
    try:  # from before its start: an interrupt may come while it starts
        thread.start()
        yield
    finally:
        stopped.set()
        if thread.ident is not None:
            thread.join()
        time_s, query, hit = np.array(rows, np.float64).reshape(-1, 3).T
        np.savez_compressed(file, time_s=time_s, query_tokens=query, hit_tokens=hit)


def _delta(before: dict[str, float], after: dict[str, float], unit: str, kind: str) -> float:
    name = compute.series(f"sagellm_prefix_{unit}_total", kind=kind, admission="first")
    return after.get(name, 0.0) - before.get(name, 0.0)


@cache
def _text_tokens(model: Path) -> np.ndarray:
    """Return English and code in tokens of a model."""
    return np.array(RealText(model).tokens)


def _vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def _decoder(model: Path) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json")).decode
