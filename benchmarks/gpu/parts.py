"""The parts of the kit. A part is a function; it runs in a process of its own and returns figures and checks.

    python -m benchmarks.gpu.parts NAME --device cuda --model FOLDER --stock FOLDER --out FILE
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.gpu.engines import Engine, bare_engine, transformers_answers
from benchmarks.gpu.place import Place, eagle3_head, make_prompts, random_model, seven_billion
from benchmarks.hook_overhead import write_bare_tree

__all__ = ["PARTS", "Result"]

NEAR = 0.75  # of a logit: a right engine in a 16-bit type chooses no token further under the best one
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
    """Requests with a common prefix get the same answers when it is read once; on a GPU the kernel is timed."""
    first, prompts = make_prompts(place, 1, 520)[0], make_prompts(place, 8, 40)
    found = {}
    for mode in ("off", "auto"):
        with Engine(place, place.model, prefix_attention=mode) as engine:
            engine.answers([first], 1)
            found[mode] = engine.answers([first + prompt for prompt in prompts], 32)
    equal = sum(one == other for one, other in zip(found["auto"], found["off"], strict=True))
    figures: dict[str, Any] = {"answers": len(prompts), "equal": equal}
    checks = {"all requests are answered": all(len(one) == 32 for one in found["auto"])}
    if place.is_small:  # in float32; 16 bits may round the other way in another order
        checks["the answers are equal"] = equal == len(prompts)
    if place.device == "cuda":
        times, error = time_kernel(16, 4096, 200)
        figures |= times
        checks["the kernel is within 1e-2 of LMDeploy's"] = error < 1e-2
    return Result(figures, checks)


def time_kernel(sequences: int, common: int, own: int) -> tuple[dict[str, float], float]:
    """Seconds of a layer's decode attention, ours and LMDeploy's, and how far they differ: 32 heads, 8 key heads of 128."""
    import torch
    from lmdeploy.pytorch.kernels.cuda import paged_attention_fwd

    from benchmarks.gpu.limits import seconds
    from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import find_groups, prefix_aware_attention

    block, heads, kv_heads, size = 64, 32, 8, 128
    shared, alone = common // block, -(-(own + 1) // block)
    tables = torch.tensor([
        [*range(shared), *range(shared + row * alone, shared + (row + 1) * alone)] for row in range(sequences)
    ])  # fmt: skip
    lengths = torch.full((sequences,), common + own + 1)
    groups = find_groups(tables.numpy(), lengths.numpy(), block, 256).to("cuda")
    tables, lengths = tables.cuda(), lengths.cuda()
    caches = [torch.randn(shared + sequences * alone, block, kv_heads, size, device="cuda").bfloat16() for _ in range(2)]
    query = torch.randn(sequences, heads, size, device="cuda").bfloat16()
    theirs = torch.empty_like(query)

    def ours() -> torch.Tensor:
        return prefix_aware_attention(query, *caches, tables, lengths, size**-0.5, groups)

    def lmdeploy() -> None:
        paged_attention_fwd(query, *caches, theirs, tables, kv_seqlens=lengths, sm_scale=size**-0.5)

    times = {"ours_s": seconds(ours), "lmdeploy_s": seconds(lmdeploy)}
    lmdeploy()
    return times, float((ours() - theirs).abs().max())


PARTS: dict[str, Callable[[Place], Result]] = {
    part.__name__: part for part in (answers, hooks, faults, replay, tiers, speculation, overhead, eagle3, sparse, sharing)
}


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
