"""The command line of the server: a YAML file, and flags that go before it."""

import sys
from pathlib import Path
from typing import Any

import click

from sagellm.core.config import DEVICES, DTYPES, ENGINES, ROLES, read_config
from sagellm.core.errors import SageError
from sagellm.serve.early import stop_at_once
from sagellm.serve.objects import with_objects


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="YAML file with any of the settings below.")
@click.option("--model", type=click.Path(path_type=Path), help="Local Hugging Face folder. Default: a demo model.")
@click.option("--model-name", help="Name in the API. Default: the folder's name.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: pytorch. turbomind needs a build with the hook table.")
@click.option("--device", type=click.Choice(DEVICES), help="Default: auto (cuda if there is a GPU, else cpu).")
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: auto (as stored; 16 bits become bfloat16 on a CPU).")
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=int, help="Default: 23333.")
@click.option("--api-key", multiple=True, help="Key that clients must send; may be given several times.")
@click.option("--kv-blocks", type=int, help="Size of the KV pool in blocks.")
@click.option("--kv-memory-share", type=float, help="Size of the KV pool as a part of free memory, between 0 and 1.")
@click.option("--host-kv-blocks", type=int, help="Host tier that plug-ins may migrate blocks to. Default: 0.")
@click.option("--kv-policy", help="Who picks victims in the KV pool: a name of `sagellm policy list`, or module:Class.")
@click.option("--kv-policy-options", help="Its options, as JSON.")
@click.option("--kv-cpu-policy", help="The same of the host tier. Default: lru.")
@click.option("--kv-cpu-options", help="Its options, as JSON.")
@click.option("--kv-disk", help="Folder of a disk tier below the host tier.")
@click.option("--kv-disk-gib", type=float, help="Its size. Default: 4.")
@click.option("--kv-disk-policy", help="Who picks victims there. Default: lru.")
@click.option("--kv-disk-options", help="Its options, as JSON.")
@click.option("--kv-migration", help="Which blocks are worth a move: always, never, cost, or module:Class. Default: cost.")
@click.option("--kv-deadline", type=float, help="Seconds after which a save or load is given up. Default: 1.")
@click.option("--kv-quotas", help="Tenant -> tier -> blocks or share, as JSON or a YAML file.")
@click.option("--block-size", type=int, help="Tokens of a KV block, a power of two. Default: 64.")
@click.option("--prefix-caching/--no-prefix-caching", default=None, help="Default: on.")
@click.option("--context-length", type=int, help="Longest prompt plus answer, in tokens.")
@click.option("--max-batch-size", type=int, help="Requests that run at once.")
@click.option("--max-prefill-tokens", type=int, help="Prompt tokens in one step. Default: 512 on a CPU, else 4096.")
@click.option("--decode-round", type=int, help="Decode steps between two looks at the queue.")
@click.option("--tensor-parallel", type=int, help="Processes (CPU) or GPUs that share the model. Default: 1.")
@click.option("--threads", type=int, help="Compute threads of a CPU worker. Default: all cores.")
@click.option(
    "--plugin", "plugins", multiple=True, help="module:Class or entry point name; may be given several times."
)
@click.option("--strategy", help="Who schedules: a name of `sagellm strategy list`, or module:Class. Default: the engine.")
@click.option("--strategy-options", help="Its options, as JSON.")
@click.option("--speculative", help="Who guesses tokens: ngram, suffix, draft, dynamic:NAME, or module:Class. Default: nobody.")
@click.option("--speculative-options", help="Its options, as JSON.")
@click.option("--plugin-time-limit-s", type=float, help="Longest a hook may take. Default: 1.")
@click.option("--record", type=click.Path(path_type=Path), help="Write every decision to this file, as JSON lines.")
@click.option("--comm-metrics", is_flag=True, default=None, help="Measure the time spent in collectives.")
@click.option("--role", type=click.Choice(ROLES), help="Of a prefill/decode group: what its proxy sends here. Default: none.")
@click.option("--proxy-url", help="The proxy of the group, http://host:port.")
@click.option("--pd-key-file", type=click.Path(path_type=Path), help="File with the secret of the group.")
@click.option("--kv-channel", help="How KV blocks move between engines: shm, tcp, ..., or module:Class. Default: auto.")
@click.option("--kv-channel-options", help="Its options, as JSON.")
@click.option("--kv-checksums", is_flag=True, default=None, help="Check KV blocks that have moved.")
@click.option("--pd-timeout-s", type=float, help="Longest wait for a prompt that another engine computes. Default: 10.")
@click.option("--pd-lease-s", type=float, help="How long KV blocks are kept for an engine that does not come. Default: 30.")
@click.option("--pd-port", type=int, help="Port of control connections. Default: any.")
@click.option(
    "--pd-trust-proxy", is_flag=True, default=None, help="The proxy is LMDeploy's own, which signs nothing; on loopback alone."
)
@click.option("--drain-timeout-s", type=float, help="Time for running requests at shutdown. Default: 10.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), help="Default: WARNING.")
@click.option("--json", "as_json", is_flag=True, help="Print the readiness line as JSON.")
def serve(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Serve a model over the OpenAI API, with LMDeploy's engine and your plug-ins in it."""
    stop_at_once()
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    try:
        settings = read_config(config, with_objects(given))
        from sagellm.serve.server import run

        code = run(settings, as_json=as_json)
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        code = 2
    sys.exit(code)
