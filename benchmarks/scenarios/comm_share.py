"""The share of communication that `/metrics` reports of a tensor-parallel engine, against one measured at the process group."""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.direct_comm import exposed_s
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {"hidden": 256, "layers": 8, "batch": 4, "prompt_tokens": 64, "new_tokens": 64, "bursts": 3}
SETTLE_S = 0.6  # ranks publish what they counted every 0.2 s
DEFINITIONS = {
    "comm_share_reported": Definition(
        unit="ratio", better=None,
        text=(
            "`comm_share` of `/metrics`' counters around `bursts` batches on two ranks over gloo on the CPU: seconds that the "
            "slowest rank's hooks saw it wait / seconds of engine steps."
        ),
    ),
    "comm_share_direct": Definition(
        unit="ratio", better=None,
        text=(
            "The share of the same batches, measured apart from the hooks: seconds that the slowest rank spent inside methods "
            "of torch's `ProcessGroup` and `Work.wait`, which are timed in the workers / wall-clock seconds of the batches as "
            "their client saw them."
        ),
    ),
    "comm_share_error": Definition(unit="ratio", better="lower", text="Reported / direct share, less 1, as a positive number."),
    "comm_share_seconds_error": Definition(
        unit="ratio", better="lower", text="Reported / direct seconds of waiting, less 1, as a positive number."
    ),
    "comm_share_steps": Definition(
        unit="ratio", better=None, text="Seconds of engine steps / wall-clock seconds of the batches: the divisors."
    ),
}  # fmt: skip


def run(
    seed: int, hidden: int, layers: int, batch: int, prompt_tokens: int, new_tokens: int, bursts: int
) -> dict[str, float]:
    from sagellm.demo_model.random_model import write_random_model

    with tempfile.TemporaryDirectory(prefix="sagellm-share-") as scratch:
        folder = Path(scratch)
        model = write_random_model(
            folder / "model", architecture="qwen2", hidden_size=hidden, num_layers=layers, num_heads=4, num_kv_heads=2,
            intermediate_size=hidden * 3, vocab_size=2048, tie_embeddings=True, dtype="float32",
        )  # fmt: skip
        return _measure(folder, model, seed, batch, prompt_tokens, new_tokens, bursts)


def _measure(
    folder: Path, model: Path, seed: int, batch: int, prompt_tokens: int, new_tokens: int, bursts: int
) -> dict[str, float]:
    from sagellm.core.config import PluginSpec, SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    (folder / "direct").mkdir()
    timer = PluginSpec(name="benchmarks.direct_comm:DirectTimer", options={"folder": str(folder / "direct")})
    config = SageConfig(
        device="cpu", threads=1, tensor_parallel=2, comm_backend="group", comm_metrics=True, context_length=1024,
        max_batch_size=batch, prefix_caching=False, plugins=(timer,),
    )  # fmt: skip
    engine = LMDeployEngine(config, model)
    try:
        prompts = [[(seed + 7 * row + column) % 2000 + 1 for column in range(prompt_tokens)] for row in range(batch)]
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        engine.generate(prompts, params)
        before, windows = _counters(engine), []
        for _ in range(bursts):
            begin = time.monotonic_ns()
            engine.generate(prompts, params)
            windows.append((begin, time.monotonic_ns()))
        after = _counters(engine)
    finally:
        engine.close()  # the workers leave what they timed
    return _compare(folder / "direct", before, after, windows)


def _counters(engine: Any) -> dict[str, float]:
    """Return the page that a scrape of `/metrics` would read."""
    from prometheus_client import CollectorRegistry, generate_latest

    from benchmarks.metrics.compute import parse_prometheus
    from sagellm.serve.metrics import families

    time.sleep(SETTLE_S)

    class Report:
        def collect(self) -> Any:
            return families(engine.hooks.report())

    registry = CollectorRegistry()
    registry.register(Report())
    return parse_prometheus(generate_latest(registry).decode())


def _compare(
    direct: Path, before: dict[str, float], after: dict[str, float], windows: list[tuple[int, int]]
) -> dict[str, float]:
    from benchmarks.metrics.comm import STEPS
    from benchmarks.metrics.compute import counter_metrics

    reported = counter_metrics(before, after, tensor_parallel=2).metrics["comm_share"]
    step_s = after[STEPS] - before[STEPS]
    wall_s = sum(end - begin for begin, end in windows) / 1e9
    ranks = [exposed_s(direct, begin, end) for begin, end in windows]
    direct_s = max(sum(of[process] for of in ranks) for process in ranks[0])
    share = direct_s / wall_s
    return {
        "comm_share_reported": reported, "comm_share_direct": share, "comm_share_error": abs(reported / share - 1),
        "comm_share_seconds_error": abs(reported * step_s / direct_s - 1), "comm_share_steps": step_s / wall_s,
    }  # fmt: skip
