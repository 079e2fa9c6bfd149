"""The command line of the server: a YAML file, and flags that go before it."""

from pathlib import Path
from typing import Any

import click

from sagellm.core.config import (
    COMPUTES,
    DTYPES,
    ENGINES,
    EXECUTORS,
    KV_SCHEMAS,
    PREFIX_ATTENTION,
    ROLES,
    WEIGHTS,
    read_config,
)
from sagellm.core.devices import device_names
from sagellm.core.early import end, stop_at_once
from sagellm.core.errors import SageError
from sagellm.serve.objects import with_objects


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="YAML file with any of the settings below.")
@click.option("--model", type=click.Path(path_type=Path), help="Name, folder, .gguf file, or hub id. Default: smollm2.")
@click.option("--model-name", help="Name in the API. Default: the name of the model.")
@click.option("--engine", type=click.Choice(ENGINES), help="LMDeploy's engine. Default: pytorch. turbomind needs a build.")
@click.option("--device", type=click.Choice(device_names()), help="Device. Default: auto (cuda if there is a GPU, else cpu).")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of weights. Default: auto (as stored; bfloat16 on a CPU).")
@click.option("--weights", type=click.Choice(WEIGHTS), help="packed: those bits of a GGUF file, on a CPU. Default: auto.")
@click.option("--quantization", help="Method of `sagellm list quantizer`, once, into the cache. Default: none.")
@click.option("--quantization-options", help="Options of --quantization, as JSON.")
@click.option("--compute", type=click.Choice(COMPUTES), help="Type of the products of a CPU. Default: auto (measured once).")
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=int, help="Port to listen on. Default: 23333.")
@click.option("--api-key", multiple=True, help="Key that clients must send; may be given several times.")
@click.option("--kv-schema", type=click.Choice(KV_SCHEMAS), help="Type of keys and values. Default: auto (the model's).")
@click.option("--kv-blocks", type=int, help="Size of the KV pool in blocks.")
@click.option("--kv-memory-share", type=float, help="Size of the KV pool as a part of free memory, between 0 and 1.")
@click.option("--host-kv-blocks", type=int, help="Size of the host tier in blocks. Default: 0, no tier.")
@click.option("--kv-policy", help="Eviction policy of the KV pool: a name of `sagellm list policy`, or module:Class.")
@click.option("--kv-policy-options", help="Options of --kv-policy, as JSON.")
@click.option("--kv-cpu-policy", help="Eviction policy of the host tier. Default: lru.")
@click.option("--kv-cpu-options", help="Options of --kv-cpu-policy, as JSON.")
@click.option("--kv-disk", help="Folder of the disk tier, which takes evicted blocks of the host tier.")
@click.option("--kv-disk-gib", type=float, help="Size of the disk tier in GiB. Default: 4.")
@click.option("--kv-disk-policy", help="Eviction policy of the disk tier. Default: lru.")
@click.option("--kv-disk-options", help="Options of --kv-disk-policy, as JSON.")
@click.option("--kv-migration", help="Migration policy: always, never, cost, or module:Class. Default: cost.")
@click.option("--kv-deadline", type=float, help="Time limit of saving or loading KV blocks, in seconds. Default: 1.")
@click.option("--kv-quotas", help="Quotas of tenants: tenant -> tier -> blocks or share, as JSON or a YAML file.")
@click.option("--block-size", type=int, help="Tokens of a KV block, a power of two. Default: 64.")
@click.option("--prefix-caching/--no-prefix-caching", default=None, help="Share cached prefixes. Default: on.")
@click.option("--context-length", type=int, help="Longest prompt plus answer, in tokens.")
@click.option("--max-batch-size", type=int, help="Requests that run at once.")
@click.option("--max-prefill-tokens", type=int, help="Prompt tokens in one step. Default: 512 on a CPU, else 4096.")
@click.option("--decode-round", type=int, help="Decode steps between two scheduling decisions. Default: 1 on a CPU, else 16.")
@click.option("--tensor-parallel", type=int, help="Processes (CPU) or GPUs that share the model. Default: 1.")
@click.option(
    "--distributed-executor-backend", type=click.Choice(EXECUTORS),
    help="Workers of --tensor-parallel: mp (processes), or ray. Default: auto (mp on a CPU).",
)
@click.option("--ray-address", help="Head of the Ray cluster, host:port, or auto (of this machine).")
@click.option("--restart-workers", is_flag=True, default=None, help="Start again after the engine or a worker has died.")
@click.option("--sot-workers", type=int, help="Further engines that write points of skeleton-of-thought. Default: 0.")
@click.option("--threads", type=int, help="Compute threads of a CPU worker. Default: all cores.")
@click.option(
    "--plugin", "plugins", multiple=True, help="Plug-in: module:Class or an entry point; may be given several times."
)
@click.option("--strategy", help="Scheduling strategy: a name of `sagellm list strategy`, or module:Class. Default: none.")
@click.option("--strategy-options", help="Options of --strategy, as JSON.")
@click.option("--speculative", help="Speculative strategy: ngram, suffix, draft, dynamic:NAME, or module:Class. Default: none.")
@click.option("--speculative-options", help="Options of --speculative, as JSON.")
@click.option(
    "--speculative-config", "--speculative_config",
    help="JSON with method, model, num_speculative_tokens, draft_tensor_parallel_size, in place of --speculative.",
)
@click.option("--prefix-attention", type=click.Choice(PREFIX_ATTENTION), help="Read shared prefixes once. Default: off.")
@click.option("--sparsity", help="Sparse policy: a name of `sagellm list sparsity`, or module:Class. Default: none.")
@click.option("--sparsity-options", help="Options of --sparsity, as JSON.")
@click.option("--plugin-time-limit-s", type=float, help="Time limit of a hook, in seconds. Default: 1.")
@click.option("--record", type=click.Path(path_type=Path), help="Write every decision to this file, as JSON lines.")
@click.option("--comm-backend", help="Backend of the workers' sums: auto, group, shm, gloo, or module:Class. Default: auto.")
@click.option("--comm-options", help="Options of --comm-backend, as JSON.")
@click.option("--comm-metrics", is_flag=True, default=None, help="Measure the time spent in collectives.")
@click.option("--role", type=click.Choice(ROLES), help="Role in a prefill/decode group. Default: no group.")
@click.option("--proxy-url", help="Proxy of the prefill/decode group, http://host:port.")
@click.option(
    "--pd-key-file", type=click.Path(path_type=Path),
    help="File with the key of the prefill/decode group; without a role, key by which a manager reads what is cached.",
)
@click.option("--kv-channel", help="KV transfer channel between engines: shm, tcp, ..., or module:Class. Default: auto.")
@click.option("--kv-channel-options", help="Options of --kv-channel, as JSON.")
@click.option("--kv-checksums", is_flag=True, default=None, help="Verify a checksum of transferred KV blocks.")
@click.option("--pd-timeout-s", type=float, help="Longest wait for a prompt from another engine, in seconds. Default: 10.")
@click.option("--pd-lease-s", type=float, help="Time to keep KV blocks for another engine, in seconds. Default: 30.")
@click.option("--pd-port", type=int, help="Port of control connections. Default: any.")
@click.option(
    "--pd-trust-proxy", is_flag=True, default=None, help="Trust unsigned requests of LMDeploy's own proxy; loopback only."
)
@click.option("--max-body-mib", type=float, help="Largest body of a request, in MiB. Default: 8.")
@click.option("--hold-limit-s", type=float, help="Longest time that a strategy may hold all requests, in seconds. Default: 60.")
@click.option("--drain-timeout-s", type=float, help="Time for running requests at shutdown, in seconds. Default: 10.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), help="Log level. Default: WARNING.")
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
    end(code)
