"""A contestant: the real engine with one speculative strategy, or with none, in a process of its own."""

import time
from pathlib import Path
from typing import Any

NONE = "none"


def build(model: str, threads: int, strategy: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Answers {"batches": lists of prompts, "new", "stop", "temperature"} with the tokens, the seconds of the whole and of the
    process, and what the strategy counted meanwhile. The batches are answered one after the other; answers end with a token of
    `stop`, or after `new` tokens."""
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    speculative = {} if strategy == NONE else {"speculative": strategy, "speculative_options": options}
    sizes = {"context_length": 2048, "max_batch_size": 16, "block_size": 64, "kv_blocks": 400, "prefix_caching": False}
    known = {"device": "cpu", "threads": threads} | sizes | settings
    engine = LMDeployEngine(SageConfig(**known, **speculative), Path(model))
    engine.generate([[5] * 300] * 2, SamplingParams(max_new_tokens=8, ignore_eos=True))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tokens, decoded, decode_s = [], 0, 0.0
        before, cpu_s, start_s = _counts(engine), time.process_time(), time.perf_counter()
        for prompts in request["batches"]:
            found = engine.generate(prompts, [_params(request, number) for number in range(len(prompts))])
            # From the first token of the last request to have one: what decoding takes, without the prompts.
            begun_s = max(one.token_s[0] for one in found)
            decoded += sum(sum(at > begun_s for at in one.token_s) for one in found)
            decode_s += max(one.token_s[-1] for one in found) - begun_s
            tokens += [one.token_ids for one in found]
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        after = _counts(engine)
        return {
            "tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s, "tokens_per_s": decoded / decode_s if decode_s else None,
            "counts": {name: after[name] - before[name] for name in after},
        }  # fmt: skip

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def _params(request: dict[str, Any], number: int) -> Any:
    from sagellm.engines.base import SamplingParams

    return SamplingParams(
        max_new_tokens=request["new"], ignore_eos=not request["stop"], stop_token_ids=tuple(request["stop"]),
        temperature=request["temperature"], seed=number + 1,
    )  # fmt: skip


def _counts(engine: Any) -> dict[str, float]:
    report = engine.hooks.report()["speculation"] or {}
    names = ("drafted", "accepted", "sequences", "propose_s", "step_s", "faults")
    return {name: report.get(name, 0) for name in names}
