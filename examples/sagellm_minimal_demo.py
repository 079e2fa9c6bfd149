"""A manager, an engine, an answer: the smallest use of the control plane, with the times of the answer's tokens.

    .venv/bin/python examples/sagellm_minimal_demo.py [--model smollm2] [--prompt TEXT] [--max-tokens 32]

The manager opens a gateway on a free port and starts one engine behind it. The client asks the gateway, as any OpenAI client
would. Everything ends with the program.
"""

import time

import click

from sagellm import ControlPlaneManager, UnifiedInferenceClient
from sagellm.core.devices import device_names


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name, folder, .gguf file or hub id.")
@click.option("--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engine.")
@click.option("--threads", type=click.IntRange(1), help="Compute threads of the CPU device [all cores].")
@click.option("--prompt", default="What is the capital of France?", show_default=True, help="A message of the user.")
@click.option("--max-tokens", type=click.IntRange(2), default=32, show_default=True, help="Most tokens of the answer.")
def main(model: str, device: str, threads: int | None, prompt: str, max_tokens: int) -> None:
    """Ask once, and print the answer, its time to first token (TTFT) and its time per output token (TPOT)."""
    with ControlPlaneManager(port=0, publish=False) as manager:
        engine = manager.register_engine("demo", "sagellm", model=model, device=device, threads=threads)
        click.echo(f"{engine['models'][0]} on {engine['device']} after {engine['register_s']:.1f} s, behind {manager.url}/v1")
        with UnifiedInferenceClient(manager.url) as client:
            begun = time.perf_counter()
            times = []
            for piece in client.chat(prompt, stream=True, max_tokens=max_tokens):
                times.append(time.perf_counter() - begun)
                click.echo(piece, nl=False)
        click.echo()
        if not times:
            raise click.ClickException("the answer has no token; ask something else.")
        tpot_ms = 1000 * (times[-1] - times[0]) / max(1, len(times) - 1)
        click.echo(f"TTFT {1000 * times[0]:.1f} ms, TPOT {tpot_ms:.1f} ms, {len(times)} pieces")


if __name__ == "__main__":
    main()
