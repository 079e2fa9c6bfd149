"""A contestant: the real engine with one speculative strategy, or with none, in a process of its own."""

import time
from pathlib import Path
from typing import Any

NONE = "none"


def build(model: str, threads: int, strategy: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Answers {"prompts", "new", "temperature"} with the tokens, the seconds of the whole and of the process, and what the
    strategy counted meanwhile."""
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    speculative = {} if strategy == NONE else {"speculative": strategy, "speculative_options": options}
    sizes = {"context_length": 2048, "max_batch_size": 16, "block_size": 64, "kv_blocks": 400, "prefix_caching": False}
    engine = LMDeployEngine(SageConfig(device="cpu", threads=threads, **sizes | settings, **speculative), Path(model))
    engine.generate([[5] * 300] * 2, SamplingParams(max_new_tokens=8, ignore_eos=True))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        temperature = request.get("temperature", 0.0)
        params = [
            SamplingParams(max_new_tokens=request["new"], ignore_eos=True, temperature=temperature, seed=number + 1)
            for number in range(len(request["prompts"]))
        ]
        before, cpu_s, start_s = _counts(engine), time.process_time(), time.perf_counter()
        found = engine.generate(request["prompts"], params)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        after = _counts(engine)
        # From the first token of the last request to have one: what decoding takes, without the prompts.
        begun_s = max(one.token_s[0] for one in found)
        decoded = sum(sum(at > begun_s for at in one.token_s) for one in found)
        end_s = max(one.token_s[-1] for one in found)
        return {
            "tokens": [one.token_ids for one in found], "wall_s": wall_s, "cpu_s": cpu_s,
            "tokens_per_s": decoded / (end_s - begun_s), "counts": {name: after[name] - before[name] for name in after},
        }  # fmt: skip

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def _counts(engine: Any) -> dict[str, float]:
    report = engine.hooks.report()["speculation"] or {}
    names = ("drafted", "accepted", "sequences", "propose_s", "step_s", "faults")
    return {name: report.get(name, 0) for name in names}
