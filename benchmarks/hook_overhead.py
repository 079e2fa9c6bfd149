"""Cost of the hooks: CPU time of an engine step without hooks, with them, and with a no-op plug-in on every hook.

    python -m benchmarks.hook_overhead [--model NAME] [--starts 4] [--rounds 20] [--out FILE]

The engine without hooks is the installed one less every line that a patch marks, but for those of 0006, the CPU device. A
round is a batch of requests on a tiny model, or on the one that is named, one thread. Its figure is the CPU time of the whole
process over the number of decode steps, so the model's own work counts. Two processes of the same code differ by a percent
(memory layout, hash seeds), so all start anew a few times. A second engine without hooks runs along as the control; its
difference is the error of the measurement.
"""

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output

BATCH, PROMPT_TOKENS, NEW_TOKENS = 4, 48, 128
BARE, HOOKS, PLUGIN = "no hooks", "hooks, no plug-in", "no-op plug-in on every hook"
DECIDES = "plug-in that decides each step"
CONTROL = "no hooks, again"


@click.command()
@click.option("--model", "source", help="Name or folder of a model; default: a tiny one of random weights.")
@click.option("--starts", default=4, show_default=True, help="Times that every contestant starts anew.")
@click.option("--rounds", default=20, show_default=True, help="Rounds of each start.")
@with_output
def main(source: str | None, starts: int, rounds: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    from sagellm.core.config import HookConfig, PluginSpec
    from sagellm.demo_model.random_model import write_random_model

    noop, decides = (
        HookConfig(plugins=(PluginSpec(name=f"benchmarks.noop_plugin:{name}"),)).model_dump_json()
        for name in ("NoOp", "EngineOrder")
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(source) if source else write_random_model(
            Path(scratch) / "tiny", architecture="llama", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
            intermediate_size=128, vocab_size=512, dtype="float32", max_position_embeddings=2048,
        )  # fmt: skip
        bare = write_bare_tree(Path(scratch) / "bare")
        answers = {}
        for _ in range(starts):
            contestants = [
                Contestant(BARE, build, str(model), None, str(bare)),
                Contestant(HOOKS, build, str(model), None, None),
                Contestant(PLUGIN, build, str(model), noop, None),
                Contestant(DECIDES, build, str(model), decides, None),
                Contestant(CONTROL, build, str(model), None, str(bare)),
            ]
            try:
                interleave(contestants, None, 2)
                for name, values in interleave(contestants, None, rounds).items():
                    answers.setdefault(name, []).extend(values)
            finally:
                for contestant in contestants:
                    contestant.close()
    result = {"model": source or "tiny", "starts": starts, "rounds": rounds, "step_cpu_us": {}, "ratio": {}}
    for name, values in answers.items():
        result["step_cpu_us"][name] = summary(values)
        result["ratio"][name] = paired_ratio(values, answers[BARE])
    rows = [(name, f"{result['step_cpu_us'][name]['median']:.1f}", spread(result["ratio"][name], ".4f")) for name in answers]
    output.say(table(["contestant", "us a step", "over the bare engine"], rows))
    output.finish(result)


def write_bare_tree(folder: Path) -> Path:
    """Write the installed LMDeploy without all patches but 0006, as a folder for `sys.path`."""
    source = Path(find_spec("lmdeploy").origin).parent
    shutil.copytree(source, folder / "lmdeploy", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    mark = re.compile(r"# sage:(?!0006)\d{4}\b")
    for file in (folder / "lmdeploy").rglob("*.py"):
        text = file.read_text()
        if mark.match(text):  # a file of the patch
            file.unlink()
        elif mark.search(text):
            file.write_text("".join(line for line in text.splitlines(keepends=True) if not mark.search(line)))
    return folder


def build(model: str, spec: str | None, tree: str | None) -> Any:
    """An engine of the tree given, or of the installed one, driven without anything of ours around it."""
    if tree is not None:
        sys.path.insert(0, tree)
    os.environ["OMP_NUM_THREADS"] = "1"
    import asyncio

    import torch
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine

    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    options = {} if tree is not None else {"sage": spec}
    config = PytorchEngineConfig(
        device_type="cpu", dtype="float32", block_size=16, num_gpu_blocks=256, max_batch_size=BATCH, prefill_interval=1,
        enable_prefix_caching=True, session_len=1024, **options,
    )  # fmt: skip
    sampling = GenerationConfig(max_new_tokens=NEW_TOKENS, top_k=1, ignore_eos=True, stop_token_ids=[])

    async def start() -> Any:
        engine = Engine.from_pretrained(model, engine_config=config)
        engine.start_loop()
        return engine

    engine = loop.run_until_complete(start())
    sessions = iter(range(10**9))
    prompts = [[(7 * row + column) % 400 + 50 for column in range(PROMPT_TOKENS)] for row in range(BATCH)]

    async def one(prompt: list[int]) -> None:
        session, instance = next(sessions), engine.create_instance()
        async for _ in instance.async_stream_infer(session, prompt, gen_config=sampling):
            pass
        await instance.async_end(session)

    async def run() -> None:
        await asyncio.gather(*(one(prompt) for prompt in prompts))

    def answer(_: Any) -> float:
        start_s = time.process_time()
        loop.run_until_complete(run())
        return (time.process_time() - start_s) / NEW_TOKENS * 1e6

    answer.close = lambda: close_bare(engine, loop)
    return answer


def close_bare(engine: Any, loop: Any) -> None:
    """End an engine of LMDeploy, and what is left on the loop that it was driven by."""
    import asyncio

    engine.close()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
