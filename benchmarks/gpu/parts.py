"""The parts of the kit. A part is a function; it runs in a process of its own and returns figures and checks.

    python -m benchmarks.gpu.parts NAME --device cuda --model FOLDER --stock FOLDER --out FILE
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.hook_overhead import close_bare, write_bare_tree

__all__ = ["PARTS", "Place", "Result"]

NEAR = 0.75  # of a logit: a right engine in a 16-bit type chooses no token further under the best one
NOOP, RAISES = "benchmarks.noop_plugin:NoOp", "benchmarks.gpu.plugins:Raises"


class Place(NamedTuple):
    """Where a part runs.

    Attributes:
        device: name of LMDeploy's device.
        model: folder of the demo model.
        stock: folder for `sys.path` that holds LMDeploy as shipped, or with the CPU device alone.
        scratch: empty folder.
    """

    device: str
    model: Path
    stock: Path
    scratch: Path

    @property
    def is_small(self) -> bool:
        """Whether models are tiny, since the device is this processor."""
        return self.device == "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32",) if self.is_small else ("bfloat16", "float16")


class Result(NamedTuple):
    """Result of a part.

    Attributes:
        figures: measured numbers and counts, JSON.
        checks: what must hold, by a sentence that says it.
    """

    figures: dict[str, Any]
    checks: dict[str, bool]


def answers(place: Place) -> Result:
    """Greedy answers of the demo model beside those of transformers."""
    prompts, figures, checks = _prompts(place, 24, 120), {}, {}
    for dtype in place.dtypes:
        with _Engine(place, place.model, dtype=dtype) as engine:
            ours = engine.answers(prompts, 64)
        theirs, gap = _transformers(place, dtype, prompts, ours)
        equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
        figures[dtype] = {"answers": len(prompts), "equal": equal, "largest_gap": gap}
        checks[f"{dtype}: every token is at most {NEAR} under the best logit"] = gap <= NEAR
        if dtype == "float32":
            checks["float32: all answers are equal"] = equal == len(prompts)
    return Result(figures, checks)


def hooks(place: Place) -> Result:
    """Every hook is called in a run with shared prefixes and a pool that is too small."""
    prompts = _prompts(place, 12, 500)
    prompts += [prompt[:400] + prompts[0][:60] for prompt in prompts]
    with _Engine(place, place.model, plugins=[NOOP], kv_blocks=40, max_batch_size=8) as engine:
        engine.answers(prompts, 96)
        report = engine.report()
    calls = {hook: count for _, hook, count in report["calls"]} | _collectives(place)
    wanted = (
        "select_victims", "on_evicted", "lookup_prefix", "on_prefix_matched", "on_prefix_stored", "on_prefix_released", "admit",
        "schedule", "on_step_end", "on_request_end", "comm_begin", "comm_end",
    )  # fmt: skip
    return Result(
        {"calls": calls, "evicted": report["evicted"], "prefix": report["prefix"]},
        {f"{name} is called": calls.get(name, 0) > 0 for name in wanted} | {"no hook fails": not report["faults"]},
    )


def faults(place: Place) -> Result:
    """A plug-in that raises is switched off, and no answer changes."""
    prompts = _prompts(place, 8, 200)
    with _Engine(place, place.model) as engine:
        expected = engine.answers(prompts, 32)
    with _Engine(place, place.model, plugins=[RAISES]) as engine:
        found, report = engine.answers(prompts, 32), engine.report()
    return Result(
        {"faults": report["faults"], "enabled": report["enabled"]},
        {
            "all requests are answered": all(len(each) == 32 for each in found),
            "the plug-in is switched off": not any(report["enabled"].values()),
            "the answers are those without it": found == expected,
        },
    )


def replay(place: Place) -> Result:
    """A record of the engine replays without a difference: evictions of a policy, decisions of a strategy."""
    from sagellm.core.config import KVConfig
    from sagellm.replay.schedule.verify import verify_schedule
    from sagellm.replay.verify import verify_log

    record, prompts = place.scratch / "record.jsonl", _prompts(place, 16, 400)
    sizes = {"kv_blocks": 40, "max_batch_size": 8, "host_kv_blocks": 16}
    with _Engine(place, place.model, kv=KVConfig(policy="arc"), strategy="slo_aware", record=record, **sizes) as engine:
        for _ in range(2):
            engine.answers(prompts, 48)
    policy, strategy = verify_log(record), verify_schedule(record)
    return Result(
        {
            "victims": policy.num_victims, "decisions": policy.num_decisions, "steps": strategy.num_steps,
            "differences": len(policy.differences) + len(strategy.differences),
        },
        {
            "there are victims and steps": policy.num_victims > 0 and strategy.num_steps > 0,
            "no decision differs": policy.agrees and strategy.agrees,
        },
    )  # fmt: skip


def tiers(place: Place) -> Result:
    """Blocks move to host memory and back, and answers stay what they were."""
    from sagellm.core.config import KVConfig

    # On a GPU 32 KiB a token in 16 bits.
    layers, width = (2, 64) if place.is_small else (8, 1024)
    model = _random_model(place, "wide", hidden_size=width, num_layers=layers, num_heads=width // 64, num_kv_heads=width // 64)
    prompts = _prompts(place, 8, 600)
    sizes = {"kv_blocks": 32, "max_batch_size": 2, "host_kv_blocks": 128}
    with _Engine(place, model, kv=KVConfig(migration="always"), **sizes) as engine:
        first = [engine.timed([prompt], 16) for prompt in prompts]
        again = [engine.timed([prompt], 16) for prompt in prompts]
        report = engine.report()
    copied = report["pool"]["copied"]
    figures = {
        "migrated": report["migrated"],
        "first_token_s": summary([each[1] for each in first]),
        "first_token_again_s": summary([each[1] for each in again]),
    } | {
        f"{way}_gb_s": moved / seconds / 1e9 if seconds else None
        for way, (moved, seconds) in ((way.replace("->", "_to_"), each) for way, each in copied.items())
    }
    return Result(
        figures,
        {
            "blocks moved both ways": min(report["migrated"].get(tier, 0) for tier in ("cpu", "gpu")) > 0,
            "the answers are the same": [each[0] for each in first] == [each[0] for each in again],
        },
    )


def speculation(place: Place) -> Result:
    """Guesses from text on a task of copying, with `ngram` and `suffix`, beside no guesses."""
    from benchmarks.speculation.chain_model import write_chain_model
    from benchmarks.speculation.engine import NONE, build
    from benchmarks.speculation.texts import ChainTexts

    layers, width, vocab = (2, 64, 2000) if place.is_small else (24, 1024, 32_000)
    model = write_chain_model(
        _random_model(
            place, "chain", hidden_size=width, num_layers=layers, num_heads=width // 64, num_kv_heads=width // 64,
            vocab_size=vocab, tie_embeddings=True,
        )
    )  # fmt: skip
    settings = {"device": place.device, "dtype": place.dtypes[0]}
    texts, names = ChainTexts(vocab), (NONE, "ngram", "suffix")
    contestants = [Contestant(name, build, str(model), 2, name, {}, settings) for name in names]
    request = {"batches": [texts.prompts("copy", 1, 1), texts.prompts("copy", 4, 2)], "new": 256, "stop": [], "temperature": 0}
    try:
        interleave(contestants, request, 1)
        found = interleave(contestants, request, 3)
    finally:
        for contestant in contestants:
            contestant.close()
    figures: dict[str, Any] = {}
    for name in names[1:]:
        counts = found[name][-1]["counts"]
        figures[name] = {
            "speed": paired_ratio(*([each["tokens_per_s"] for each in found[which]] for which in (name, NONE))),
            "accepted": counts["accepted"] / max(1, counts["drafted"]),
        }
    return Result(
        figures,
        {f"{each}: the answers are those of none": found[each][0]["tokens"] == found[NONE][0]["tokens"] for each in names[1:]}
        | {f"{each}: guesses are accepted": figures[each]["accepted"] > 0 for each in names[1:]},
    )


def eagle3(place: Place) -> Result:
    """LMDeploy's EAGLE-3 with a random head: it guesses wrongly, and no answer may change."""
    if place.is_small:
        return Result({"left_out": "LMDeploy's EAGLE-3 needs a GPU"}, {})
    model = _random_model(place, "target", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8)
    head = _eagle3_head(model, place.scratch / "head")
    prompts = _prompts(place, 8, 100)
    with _Engine(place, model) as engine:
        expected = engine.answers(prompts, 48)
    options = {"model": str(head), "num_speculative_tokens": 3}
    with _Engine(place, model, speculative="eagle3", speculative_options=options) as engine:
        found, report = engine.answers(prompts, 48), engine.report()
    _, gap = _transformers(place, place.dtypes[0], prompts, found, model)
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    return Result(
        {"answers": len(prompts), "equal": equal, "largest_gap": gap, "speculation": report["speculation"]},
        {
            "all requests are answered": all(len(each) == 48 for each in found),
            f"every token is at most {NEAR} under the best logit": gap <= NEAR,
        },
    )


def overhead(place: Place) -> Result:
    """First token and decode step of the shape of Qwen2.5-7B: LMDeploy as shipped, patched, and with a no-op plug-in."""
    folder, batches = _big_config(place), (1, 8) if place.is_small else (1, 32)
    names = ("as shipped", "patched", "patched, no-op plug-in")
    # LMDeploy as shipped has no CPU device: there its place is taken by the one with that patch alone.
    stock = write_bare_tree(place.scratch / "bare") if place.is_small else place.stock
    trees, plugins = (str(stock), None, None), (None, None, NOOP)
    contestants = [
        Contestant(name, _bare_engine, place.device, str(folder), place.dtypes[0], max(batches), tree, plugin)
        for name, tree, plugin in zip(names, trees, plugins, strict=True)
    ]
    try:
        interleave(contestants, batches, 1)
        found = interleave(contestants, batches, 4 if place.is_small else 12)
    finally:
        for contestant in contestants:
            contestant.close()
    figures: dict[str, Any] = {"seconds": {}, "ratio": {}}
    for name in names:
        figures["seconds"][name] = {key: summary([each[key] for each in found[name]]) for key in found[name][0]}
        figures["ratio"][name] = {
            key: paired_ratio(*([each[key] for each in found[which]] for which in (name, names[0]))) for key in found[name][0]
        }
    return Result(figures, {})


PARTS: dict[str, Callable[[Place], Result]] = {
    part.__name__: part for part in (answers, hooks, faults, replay, tiers, speculation, overhead, eagle3)
}


class _Engine:
    """Our engine of a part, closed at the end."""

    def __init__(self, place: Place, model: Path, **settings: Any) -> None:
        from sagellm.core.config import SageConfig
        from sagellm.engines.lmdeploy.engine import LMDeployEngine

        sizes = {"kv_blocks": 256, "max_batch_size": 16, "context_length": 1024}
        known = {"device": place.device, "dtype": place.dtypes[0]} | sizes
        self._engine = LMDeployEngine(SageConfig(**known | settings), model)

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        return [list(each.token_ids) for each in self._generate(prompts, num_tokens)]

    def timed(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        """Answers, and seconds to the first token of the first one."""
        found = self._generate(prompts, num_tokens)
        return [list(each.token_ids) for each in found], found[0].token_s[0]

    def report(self) -> dict[str, Any]:
        return self._engine.hooks.report()

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
        from sagellm.engines.base import SamplingParams

        return self._engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))

    def __enter__(self) -> "_Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()


def _prompts(place: Place, count: int, num_tokens: int) -> list[list[int]]:
    from benchmarks.models.real_text import RealText

    text = RealText(place.model)
    return [text.completion(num_tokens, 1, number) for number in range(count)]


def _random_model(place: Place, name: str, **shape: Any) -> Path:
    from sagellm.demo_model.random_model import write_random_model

    known = {"intermediate_size": 2 * shape["hidden_size"], "vocab_size": 4096, "dtype": place.dtypes[0]}
    return write_random_model(place.scratch / name, architecture="llama", **known | shape)


def _transformers(
    place: Place, dtype: str, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], model: Path | None = None
) -> tuple[list[list[int]], float]:
    """Greedy answers of transformers, and how far the worst token of `ours` lies under the best logit there."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model or place.model, dtype=getattr(torch, dtype)).to(place.device)
    theirs, gap = [], 0.0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ours, strict=True):
            ids, new = torch.tensor([prompt], device=place.device), len(answer)
            found = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            theirs.append(found[0, len(prompt) :].tolist())
            logits = loaded(torch.tensor([[*prompt, *answer]], device=place.device)).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(answer, device=place.device)[:, None])[:, 0]
            gap = max(gap, float((logits.amax(1) - chosen).max()))
    return theirs, gap


def _collectives(place: Place) -> dict[str, int]:
    """Calls of the hooks around a collective of one rank, through LMDeploy's own function."""
    import torch
    from lmdeploy import sage_comm
    from lmdeploy.pytorch import distributed
    from torch.distributed import HashStore, destroy_process_group, group, init_process_group

    from sagellm.core.config import HookConfig
    from sagellm.core.host import PluginHost
    from sagellm.engines.lmdeploy.comm import CommObserver

    init_process_group("gloo" if place.is_small else "nccl", store=HashStore(), rank=0, world_size=1)
    host = PluginHost(HookConfig(plugins=({"name": NOOP},)))
    sage_comm.observer = CommObserver(host, 0, 1)
    try:
        distributed.all_reduce(torch.ones(1024, device=place.device), group=group.WORLD)
    finally:
        sage_comm.detach()
        destroy_process_group()
    return {hook: count for _, hook, count in host.report()["calls"] if hook.startswith("comm_")}


def _eagle3_head(target: Path, folder: Path) -> Path:
    """Write a random EAGLE-3 head for a Llama model, with the names of the published heads."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, dtype = config["num_attention_heads"] * config["head_dim"], getattr(torch, config["torch_dtype"])
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (vocab, hidden), "norm": (hidden,), "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden), "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"{name}.weight": torch.ones(shape, dtype=dtype) if len(shape) == 1
        else (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
        for name, shape in shapes.items()
    } | {"d2t": torch.zeros(vocab, dtype=torch.long)}  # fmt: skip
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "draft_vocab_size": vocab}, indent=1))
    return folder


def _big_config(place: Place) -> Path:
    """Write the configuration of the shape of Qwen2.5-7B and a tokenizer. Weights are made in memory."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    large = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "vocab_size": 152064,
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
        "num_key_value_heads": 4 if not place.is_small else 2, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": place.dtypes[0],
    }  # fmt: skip
    folder = place.scratch / "big"
    shutil.copytree(place.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config | (small if place.is_small else large), indent=1))
    return folder


def _bare_engine(device: str, model: str, dtype: str, most: int, tree: str | None, plugin: str | None) -> Any:
    """LMDeploy's engine with random weights and nothing of ours around it; answers the seconds of a round.

    Args:
        most: sequences at once.
        tree: folder of the LMDeploy to use in place of the patched one.
        plugin: name of a plug-in of the patched one.
    """
    if tree is not None:
        sys.path.insert(0, tree)
    os.environ["OMP_NUM_THREADS"] = "2"
    import torch
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine, model_agent

    def fill(model: Any, *_: Any, **__: Any) -> None:
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)

    model_agent.load_model_weights = fill  # 15 GB on a disk would take most of the kit's time
    options = {}
    if plugin is not None:
        from sagellm.core.config import HookConfig, PluginSpec

        options["sage"] = HookConfig(plugins=(PluginSpec(name=plugin),)).model_dump_json()
    config = PytorchEngineConfig(
        device_type=device, dtype=dtype, block_size=64, num_gpu_blocks=1024, max_batch_size=most, session_len=4096,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        engine = Engine.from_pretrained(model, engine_config=config)
        engine.start_loop()
        return engine

    engine, sessions = loop.run_until_complete(start()), iter(range(10**9))

    async def one(length: int, new: int) -> list[float]:
        """Times of the tokens of one request."""
        session, instance, times = next(sessions), engine.create_instance(), []
        prompt = [(7 * session + 3 * place) % 400 + 50 for place in range(length)]
        sampling = GenerationConfig(max_new_tokens=new, top_k=1, ignore_eos=True, stop_token_ids=[])
        async for output in instance.async_stream_infer(session, prompt, gen_config=sampling):
            times += [time.perf_counter()] * len(output.token_ids)
        await instance.async_end(session)
        return times

    async def batch(size: int, length: int, new: int) -> list[list[float]]:
        return await asyncio.gather(*(one(length, new) for _ in range(size)))

    def answer(batches: Sequence[int]) -> dict[str, float]:
        start_s = time.perf_counter()
        found = {"first_token_1024": loop.run_until_complete(batch(1, 1024, 1))[0][0] - start_s}
        for size in batches:
            every = loop.run_until_complete(batch(size, 64, 97))
            begin_s, end_s = max(each[0] for each in every), max(each[-1] for each in every)
            found[f"step_{size}"] = (end_s - begin_s) / 96
        return found

    answer.close = lambda: close_bare(engine, loop)  # type: ignore[attr-defined]
    return answer


@click.command()
@click.argument("name", type=click.Choice(sorted(PARTS)))
@click.option("--device", required=True, help="Device of LMDeploy.")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Folder of the demo model.")
@click.option("--stock", type=click.Path(path_type=Path), required=True, help="Folder that holds LMDeploy as shipped.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the result.")
def main(name: str, device: str, model: Path, stock: Path, out: Path) -> None:
    """Run one part."""
    with tempfile.TemporaryDirectory() as scratch:
        found = PARTS[name](Place(device, model, stock, Path(scratch)))
    out.write_text(json.dumps(found._asdict()))


if __name__ == "__main__":
    main()
