"""Clients of others, unmodified, against a server on the default model: lm-eval, llm, curl.

    python -m benchmarks.clients --bin lm_eval=PATH [--bin NAME=PATH ...] [--out FILE]

PATH is a program in an environment of its own; `benchmarks/models/README.md` says how to make them. A client that is not given
is left out. guidellm and aiperf run in `benchmarks.cross_check`. Exit code 1: a client failed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.output import Output, table, with_output
from benchmarks.processes import ServerProcess, free_port
from sagellm.models import find_model

TASKS = Path(__file__).parent / "models" / "tasks"
TIMEOUT_S = 900
QUESTION = "What is the capital of France?"


@click.command()
@click.option("--bin", "programs", multiple=True, help="NAME=PATH of a client: lm_eval, llm, curl.")
@with_output
def main(programs: tuple[str, ...], output: Output) -> None:
    """Run each client, print a table, and write the result."""
    given = dict(program.split("=", 1) for program in programs)
    if unknown := given.keys() - CLIENTS.keys():
        raise click.UsageError(f"unknown clients {', '.join(sorted(unknown))}; known are {', '.join(CLIENTS)}.")
    folder = find_model("smollm2").prepare()
    port = free_port()
    server = ServerProcess([sys.executable, "-m", "sagellm.serve", "--port", port, "--json"], port)
    rows: dict[str, Any] = {}
    try:
        server.ready()
        for name, program in given.items():
            with tempfile.TemporaryDirectory() as scratch:
                rows[name] = CLIENTS[name](program, server.url, folder, Path(scratch))
        errors = server.stderr.count("Traceback")
    finally:
        server.close()
    cells = [(name, row["codes"], json.dumps(row["figures"])) for name, row in rows.items()]
    output.say(table(["client", "exit codes", "figures"], cells))
    output.finish({"clients": rows, "tracebacks_of_the_server": errors})
    sys.exit(1 if errors or any(code for row in rows.values() for code in row["codes"]) else 0)


def _run(command: list[Any], scratch: Path, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(scratch)}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=scratch,
        env={"PATH": f"{Path(command[0]).parent}:/usr/bin:/bin"} | environment | (more or {}),
    )  # fmt: skip
    if done.returncode:
        click.echo(done.stderr[-2000:], err=True)
    return done


def lm_eval(program: str, url: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """A multiple-choice task by scores of echoed prompts, and a generation task, by completions and by chat."""
    for file in TASKS.iterdir():
        (scratch / file.name).write_text(file.read_text().replace("FOLDER", str(scratch)))
    codes, figures = [], {}
    for model, path, tasks, more in (
        ("local-completions", "completions", "sagellm_facts_choice,sagellm_facts_answer", []),
        ("local-chat-completions", "chat/completions", "sagellm_facts_answer", ["--apply_chat_template"]),
    ):
        out = scratch / model
        settings = f"model=smollm2,base_url={url}/v1/{path},tokenizer={folder},num_concurrent=2"
        done = _run(
            [program, "--model", model, "--model_args", settings, "--tasks", tasks, "--include_path", scratch,
             "--output_path", out, *more], scratch,
        )  # fmt: skip
        codes.append(done.returncode)
        for file in out.rglob("results_*.json"):
            for task, values in json.loads(file.read_text())["results"].items():
                figures[f"{model} {task}"] = {key: value for key, value in values.items() if isinstance(value, float)}
    return {"codes": codes, "figures": figures}


def llm(program: str, url: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """A prompt and a conversation with Simon Willison's `llm`, which reads OpenAI-compatible models from a file."""
    models = [{"model_id": "local", "model_name": "smollm2", "api_base": f"{url}/v1"}]
    (scratch / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    options = ["-o", "temperature", "0", "-o", "max_tokens", "20"]
    first = _run([program, "-m", "local", *options, QUESTION], scratch, {"LLM_USER_PATH": str(scratch)})
    second = _run([program, "-c", *options, "And of Italy?"], scratch, {"LLM_USER_PATH": str(scratch)})
    answers = {"first": first.stdout.strip(), "second": second.stdout.strip()}
    return {"codes": [first.returncode, second.returncode], "figures": answers}


def curl(program: str, url: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """A chat and a stream."""
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 20, "messages": [{"role": "user", "content": QUESTION}]}
    codes, figures = [], {}
    for stream in (False, True):
        content = json.dumps(body | {"stream": stream})
        address, header = f"{url}/v1/chat/completions", "Content-Type: application/json"
        done = _run([program, "-sfN", address, "-H", header, "-d", content], scratch)
        codes.append(done.returncode)
        figures["stream" if stream else "whole"] = "Paris" in done.stdout
    return {"codes": codes, "figures": figures}


CLIENTS: dict[str, Callable[[str, str, Path, Path], dict[str, Any]]] = {"lm_eval": lm_eval, "llm": llm, "curl": curl}

if __name__ == "__main__":
    main()
