"""Two kinds of engine behind one address: one that the manager starts, and a server that is there already.

    .venv/bin/python examples/two_engine_kinds.py [--url http://127.0.0.1:8000/v1] [--model smollm2]

`--url` is any OpenAI server of the same model, such as vLLM's or llama.cpp's. Without it the example starts
`python -m sagellm.serve` as that server. Half of the requests go to each engine. Then the server is drained, and the other
engine answers alone.
"""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import click
import httpx

from sagellm import ControlPlaneManager, UnifiedInferenceClient
from sagellm.core.devices import device_names
from sagellm.core.ports import free_ports


@contextlib.contextmanager
def served(model: str, device: str) -> Iterator[str]:
    """Run a server of its own until the end of the block, and yield its address."""
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "sagellm.serve", "--model", model, "--device", device, "--port", str(port), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not any('"ready": true' in line for line in server.stdout):  # it prints one line when it serves
                raise click.ClickException("the server has ended at its start.")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name, folder, .gguf file or hub id.")
@click.option("--url", help="Address of a server of the model. Default: the example starts one.")
@click.option("--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engines.")
@click.option("--requests", type=click.IntRange(2), default=6, show_default=True, help="Requests of each of the two parts.")
def main(model: str, url: str | None, device: str, requests: int) -> None:
    """Ask both engines, drain one, and ask again."""
    with contextlib.ExitStack() as stack:
        url = url or stack.enter_context(served(model, device))
        (name,) = (one["id"] for one in httpx.get(f"{url}/models", timeout=30).json()["data"])
        manager = stack.enter_context(ControlPlaneManager(port=0, publish=False, router="round-robin"))
        manager.register_engine("own", "sagellm", model=model, model_name=name, device=device)
        manager.register_engine("server", "openai", url=url)
        client = stack.enter_context(UnifiedInferenceClient(manager.url))
        for part in ("both", "server drained"):
            if part != "both":
                manager.drain_engine("server")
            for number in range(requests):
                client.chat(f"Name a city, number {number}.", max_tokens=8)
            chosen = Counter(one["engine"] for one in manager.status()["decisions"][-requests:])
            click.echo(f"{part}: " + ", ".join(f"{engine} answered {num}" for engine, num in sorted(chosen.items())))


if __name__ == "__main__":
    main()
