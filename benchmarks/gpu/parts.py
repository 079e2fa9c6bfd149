"""The parts of the kit. A part is a function; it runs in a process of its own and returns figures and checks.

    python -m benchmarks.gpu.parts NAME --device cuda --model FOLDER --stock FOLDER --out FILE
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.gpu.engines import (
    Engine,
    bare_engine,
    gaps,
    rounded_twin,
    shipped_engine,
    transformers_answers,
)
from benchmarks.gpu.kernels import time_attention, time_copies
from benchmarks.gpu.place import Place, eagle3_head, make_prompts, random_model, seven_billion
from benchmarks.hook_overhead import write_bare_tree

__all__ = ["CHECKS", "PARTS", "Result"]

NEAR = 0.75  # of a logit: a right engine in a 16-bit type chooses no token further under the best one
NEAR_8_BITS = 0.1  # of a logit, in the mean: a CPU that rounds as the GPU does, but for its 16 bits, comes to 0.03 at most
NOOP, RAISES = "benchmarks.noop_plugin:NoOp", "benchmarks.gpu.plugins:Raises"


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
    prompts, figures, checks = make_prompts(place, 24, 120), {}, {}
    for dtype in place.dtypes:
        with Engine(place, place.model, dtype=dtype) as engine:
            ours = engine.answers(prompts, 64)
        theirs, gap = transformers_answers(place, dtype, prompts, ours)
        equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
        figures[dtype] = {"answers": len(prompts), "equal": equal, "largest_gap": gap}
        checks[f"{dtype}: every token is at most {NEAR} under the best logit"] = gap <= NEAR
        if dtype == "float32":
            checks["float32: all answers are equal"] = equal == len(prompts)
    return Result(figures, checks)


def hooks(place: Place) -> Result:
    """Every hook is called in a run with shared prefixes and a pool that is too small."""
    prompts = make_prompts(place, 12, 500)
    prompts += [prompt[:400] + prompts[0][:60] for prompt in prompts]
    with Engine(place, place.model, plugins=[NOOP], kv_blocks=40, max_batch_size=8) as engine:
        engine.answers(prompts, 96)
        report = engine.report()
    calls = {hook: count for _, hook, count in report["calls"]} | one_collective(place)
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
    prompts = make_prompts(place, 8, 200)
    with Engine(place, place.model) as engine:
        expected = engine.answers(prompts, 32)
    with Engine(place, place.model, plugins=[RAISES]) as engine:
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

    record, prompts = place.scratch / "record.jsonl", make_prompts(place, 16, 400)
    sizes = {"kv_blocks": 40, "max_batch_size": 8, "host_kv_blocks": 16}
    with Engine(place, place.model, kv=KVConfig(policy="arc"), strategy="slo_aware", record=record, **sizes) as engine:
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
    model = random_model(place, "wide", hidden_size=width, num_layers=layers, num_heads=width // 64, num_kv_heads=width // 64)
    prompts = make_prompts(place, 8, 600)
    sizes = {"kv_blocks": 32, "max_batch_size": 2, "host_kv_blocks": 128}
    with Engine(place, model, kv=KVConfig(migration="always"), **sizes) as engine:
        first = [engine.timed([prompt], 16) for prompt in prompts]
        again = [engine.timed([prompt], 16) for prompt in prompts]
        report = engine.report()
    copied = report["pool"]["copied"]
    figures: dict[str, Any] = {
        "migrated": report["migrated"],
        "first_token_s": summary([each[1] for each in first]),
        "first_token_again_s": summary([each[1] for each in again]),
    } | {
        f"{way}_gb_s": moved / seconds / 1e9 if seconds else None
        for way, (moved, seconds) in ((way.replace("->", "_to_"), each) for way, each in copied.items())
    }
    checks = {
        "blocks moved both ways": min(report["migrated"].get(tier, 0) for tier in ("cpu", "gpu")) > 0,
        "the answers are the same": [each[0] for each in first] == [each[0] for each in again],
        "copies are timed": any(figures[f"{way}_gb_s"] for way in ("gpu_to_cpu", "cpu_to_gpu")),
    }
    if not place.is_small:
        figures["copies_gb_s"], checks["the bytes arrive"] = time_copies()
    return Result(figures, checks)


def speculation(place: Place) -> Result:
    """Guesses from text on a task of copying, with `ngram` and `suffix`, beside no guesses."""
    from benchmarks.speculation.chain_model import write_chain_model
    from benchmarks.speculation.engine import NONE, build
    from benchmarks.speculation.texts import ChainTexts

    layers, width, vocab = (2, 64, 2000) if place.is_small else (24, 1024, 32_000)
    model = write_chain_model(
        random_model(
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
        found = interleave(contestants, request, 5)
        first = interleave(contestants, request | {"new": 1}, 5)
    finally:
        for contestant in contestants:
            contestant.close()
    # All tokens of an answer may arrive at once, so the time of decoding is that beyond the first token.
    decode_s = {
        name: [whole["wall_s"] - one["wall_s"] for whole, one in zip(found[name], first[name], strict=True)] for name in names
    }
    figures: dict[str, Any] = {}
    for name in names[1:]:
        counts = found[name][-1]["counts"]
        figures[name] = {
            "speed": paired_ratio(decode_s[NONE], decode_s[name]),
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
    if find_spec("flash_attn_interface") is None:
        return Result({"left_out": "LMDeploy's EAGLE-3 needs FlashAttention-3, which is not installed"}, {})
    model = random_model(place, "target", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=8)
    head = eagle3_head(model, place.scratch / "head")
    prompts = make_prompts(place, 8, 100)
    with Engine(place, model) as engine:
        expected = engine.answers(prompts, 48)
    options = {"model": str(head), "num_speculative_tokens": 3}
    with Engine(place, model, speculative="eagle3", speculative_options=options) as engine:
        found, report = engine.answers(prompts, 48), engine.report()
    _, gap = transformers_answers(place, place.dtypes[0], prompts, found, model)
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
    folder, batches = seven_billion(place), (1, 8) if place.is_small else (1, 32)
    names = ("as shipped", "patched", "patched, no-op plug-in")
    # LMDeploy as shipped has no CPU device: there its place is taken by the one with that patch alone.
    stock = write_bare_tree(place.scratch / "bare") if place.is_small else place.stock
    trees, plugins = (str(stock), None, None), (None, None, NOOP)
    contestants = [
        Contestant(name, bare_engine, place.device, str(folder), place.dtypes[0], max(batches), tree, plugin)
        for name, tree, plugin in zip(names, trees, plugins, strict=True)
    ]
    try:
        interleave(contestants, batches, 1)
        found = interleave(contestants, batches, 4 if place.is_small else 8)
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


def sparse(place: Place) -> Result:
    """A sparse policy chooses blocks once a step, and a policy that reads all of them changes no answer."""
    prompts, found, reports = make_prompts(place, 8, 600), {}, {}
    for share in (None, 1.0, 0.3):
        settings = {} if share is None else {"sparsity": "streaming", "sparsity_options": {"share": share, "min_blocks": 2}}
        with Engine(place, place.model, **settings) as engine:
            found[share], reports[share] = engine.answers(prompts, 32), engine.report()["sparsity"]
    read, held = (reports[0.3][name] for name in ("read", "held"))
    return Result(
        {"read": read, "held": held},
        {
            "all blocks: the answers are those without a policy": found[1.0] == found[None],
            "some blocks: other answers, and all of them": found[0.3] != found[None] and all(map(len, found[0.3])),
            "fewer blocks are read": 0 < read < 0.8 * held and not reports[0.3]["fault"],
        },
    )


def sharing(place: Place) -> Result:
    """Requests with a common prefix get the same answers when it is read once; on a GPU kernel and step are timed."""
    common, own, sequences, new = (520, 40, 8, 32) if place.is_small else (8000, 100, 16, 192)
    layers, width = (2, 64) if place.is_small else (16, 2048)
    heads = {"num_heads": 4, "num_kv_heads": 2} if place.is_small else {"num_heads": 16, "num_kv_heads": 8}
    model = random_model(
        place, "wide", hidden_size=width, num_layers=layers, max_position_embeddings=16384, tie_embeddings=True, **heads
    )
    first, prompts = make_prompts(place, 1, common)[0], make_prompts(place, sequences, own)
    prompts, found, steps = [first + prompt for prompt in prompts], {}, {}
    sizes = {"kv_blocks": 512, "context_length": 12288}
    for mode in ("off", "auto"):
        with Engine(place, model, prefix_attention=mode, **sizes) as engine:
            engine.answers([first], 1)
            engine.answers(prompts, new)  # graphs are captured
            found[mode] = engine.answers(prompts, new)
            steps[mode] = summary([engine.step_s(prompts, new) for _ in range(5)])
            hits = engine.report()["prefix"]["hit_tokens"]
    _, gap = transformers_answers(place, place.dtypes[0], prompts[:2], found["auto"][:2], model)
    equal = sum(one == other for one, other in zip(found["auto"], found["off"], strict=True))
    figures: dict[str, Any] = {"answers": len(prompts), "equal": equal, "largest_gap": gap, "step_s": steps, "hit_tokens": hits}
    checks = {
        "prompts share blocks": hits > 0,
        "all requests are answered": all(len(one) == new for one in found["auto"]),
        f"every token is at most {NEAR} under the best logit": gap <= NEAR,
    }
    if place.is_small:  # in float32; 16 bits may round the other way in another order
        checks["the answers are equal"] = equal == len(prompts)
    else:
        figures["kernels"], error = time_attention()
        checks["the kernel is within 1e-2 of LMDeploy's"] = error < 1e-2
    return Result(figures, checks)


def quantized(place: Place) -> Result:
    """LMDeploy as shipped loads the folders of `sagellm quantize`, and computes what they say.

    AWQ and GPTQ are compared with the CPU device in float32, the others with a twin that rounds inputs to 8 bits too.
    """
    import torch

    from sagellm.accel.quantization.calibration import Calibration
    from sagellm.accel.quantization.registry import make_quantizer
    from sagellm.core.config import SageConfig
    from sagellm.evaluate.models import EngineModel

    torch.set_num_threads(2)  # other parts run beside
    # One layer: with four, numbers that 16 bits round to another value in 8 bits moved logits of random weights by 2.
    model = random_model(place, "whole", hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2)
    stock = write_bare_tree(place.scratch / "bare") if place.is_small else place.stock
    prompts, figures, checks, contestants = make_prompts(place, 6, 100), {}, {}, {}
    for name in ("awq", "gptq", "int8", "smoothquant", "fp8"):
        folder = place.scratch / name
        make_quantizer(name, head_bits=16).quantize(model, Calibration.default(4, 256), folder)
        # LMDeploy's AWQ and W8A8 take no other type.
        dtype = "float16" if name != "fp8" and not place.is_small else place.dtypes[0]
        contestants[name] = Contestant("as shipped", shipped_engine, place.device, str(folder), dtype, str(stock))
    for name, contestant in contestants.items():
        try:
            answers = contestant.ask((prompts, 24))
        except RuntimeError as error:
            figures[name], checks[f"{name}: LMDeploy as shipped answers"] = str(error)[-1000:], False
            continue
        finally:
            contestant.close()
        # The CPU device keeps inputs whole in float32.
        if place.is_small or name in ("awq", "gptq"):
            config = SageConfig(device="cpu", dtype="float32", threads=2, model=place.scratch / name)
            with EngineModel(name, config) as reference:
                found = gaps(reference.logits, prompts, answers)
        else:
            found = gaps(rounded_twin(model, place.scratch / name), prompts, answers)
        # One number that is rounded the other way to 8 bits may move a single token far.
        mean = float(found.mean())
        figures[name] = {"mean_gap": mean, "largest_gap": float(found.max())}
        checks[f"{name}: tokens are {NEAR_8_BITS} under the best logit at most, in the mean"] = mean <= NEAR_8_BITS
    return Result(figures, checks)


def kv_schemas(place: Place) -> Result:
    """Keys and values in 8 and in 4 bits, beside transformers with whole ones."""
    prompts, figures = make_prompts(place, 12, 100), {}
    for schema in ("int8", "int4"):
        with Engine(place, place.model, kv_schema=schema) as engine:
            answers = engine.answers(prompts, 24)
        expected, gap = transformers_answers(place, place.dtypes[0], prompts, answers)
        equal = sum(one == other for one, other in zip(answers, expected, strict=True))
        figures[schema] = {"answers": len(prompts), "equal": equal, "largest_gap": gap}
    text = f"int8: every token is at most {NEAR} under the best logit"
    return Result(figures, {text: figures["int8"]["largest_gap"] <= NEAR})


def operators(place: Place) -> Result:
    """The operators of LMDeploy's device against plain formulas: what `sagellm check device` asks of a device of ours."""
    import torch
    from lmdeploy.pytorch.backends.selector import get_backend

    from sagellm.engines.lmdeploy.contract import device, operators

    if place.is_small:
        ops = device.operators_of("cpu")
    else:
        ops = operators.DeviceOperators(get_backend(), place.device, (torch.bfloat16, torch.float16))
    missing, broken = operators.missing_operators(ops), []
    seen = operators.check_operators(ops, 0, lambda rule, text: broken.append((rule, text)), missing)
    return Result(
        {"missing": missing, "tried": sorted(seen), "broken": [f"{rule}: {text}" for rule, text in broken]},
        {operators.RULES[rule]: all(rule != each for each, _ in broken) for rule in sorted(seen)},
    )


def architectures(place: Place) -> Result:
    """A tiny model of each architecture beside transformers, token by token."""
    from sagellm.engines.lmdeploy.contract.architectures import ARCHITECTURES

    left_out = {} if find_spec("openai_harmony") else {"GptOss": "LMDeploy needs the package openai_harmony for it"}
    names = [each for each in ARCHITECTURES if each not in left_out]
    count = max(1, min(4, (os.cpu_count() or 1) // 4))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        # Tiny models round much in bfloat16.
        shares = [(place.device, place.dtypes[-1], names[number::count]) for number in range(count)]
        broken = [text for texts in pool.starmap(check_architectures, shares) for text in texts]
    is_right = {each: not any(text.startswith((f"{each}:", f"{each},")) for text in broken) for each in names}
    return Result({"broken": broken, "left_out": left_out}, is_right)


def check_architectures(device: str, dtype: str, names: Sequence[str]) -> list[str]:
    """Return all that is wrong with the answers of a tiny model of each of these architectures."""
    from sagellm.engines.lmdeploy.contract import architectures

    broken: list[str] = []
    architectures.check_architectures(device, dtype, 0, lambda _, text: broken.append(text), names)
    return broken


# Parts that measure run alone, those that only check beside each other.
CHECKS = (quantized, answers, architectures, hooks, faults, replay, sparse, kv_schemas, operators, eagle3)
TIMED = (sharing, tiers, speculation, overhead)
PARTS: dict[str, Callable[[Place], Result]] = {part.__name__: part for part in (*CHECKS, *TIMED)}


def one_collective(place: Place) -> dict[str, int]:
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
