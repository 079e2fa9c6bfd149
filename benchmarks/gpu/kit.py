"""Runs the parts of the kit, each in a process with a time limit, and writes one JSON file and one page.

    python -m benchmarks.gpu.kit --device cuda --model FOLDER --stock FOLDER --out FOLDER [--minutes 8] [--parts NAME,...]

A part that fails is a finding with its traceback; the next one runs. `start.py` of a bundle calls this on a bare machine.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.parts import CHECKS, PARTS
from benchmarks.gpu.report import markdown
from benchmarks.machine import describe
from benchmarks.output import json_text

MOST_AT_ONCE = 8  # parts that only check
ERROR_CHARS = 4000  # of the end of a failed part's output
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--device", default="cuda", show_default=True, help="Device of LMDeploy.")
@click.option("--model", type=FOLDER, required=True, help="Folder of the demo model.")
@click.option("--stock", type=FOLDER, required=True, help="Folder that holds LMDeploy as shipped.")
@click.option("--out", type=FOLDER, required=True, help="Folder for NAME.json and NAME.md.")
@click.option("--name", default="device", show_default=True, help="Name of the two files.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Parts, in the order in which they run.")
@click.option("--minutes", type=click.FloatRange(0.1), default=8.0, show_default=True, help="Time for all parts.")
@click.option("--bundle", type=click.Path(path_type=Path, dir_okay=False), help="JSON file of the bundle: its revision.")
def main(
    device: str, model: Path, stock: Path, out: Path, name: str, parts: str, minutes: float, bundle: Path | None
) -> None:
    """Prove the hooks on a device. Exit code 1: a part failed."""
    if unknown := [each for each in parts.split(",") if each not in PARTS]:
        raise click.UsageError(f"unknown part {unknown[0]!r}; allowed are {', '.join(PARTS)}.")
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": describe() | (json.loads(bundle.read_text()) if bundle else {}),
        "device": {"name": device} | _ask(device),
        "parts": {},
    }

    def run(part: str) -> None:
        found = run_part(part, device, model, stock, end_s - time.monotonic())
        with writing:
            click.echo(f"{part}: {state(found)} after {found['seconds']:.0f} s")
            done = result["parts"] | {part: found}
            result["parts"] = {each: done[each] for each in wanted if each in done}
            (out / f"{name}.json").write_text(json_text(result))
            (out / f"{name}.md").write_text(markdown(result))

    wanted, writing, checks = parts.split(","), threading.Lock(), {part.__name__ for part in CHECKS}
    with ThreadPoolExecutor(max(1, min(MOST_AT_ONCE, (os.cpu_count() or 1) // 2))) as pool:
        list(pool.map(run, [part for part in wanted if part in checks]))
    for part in wanted:
        if part not in checks:
            run(part)
    sys.exit(any(state(found) != "passed" for found in result["parts"].values()))


def state(found: dict[str, Any]) -> str:
    """Return passed, failed (a check), or broken (no result)."""
    if "error" in found:
        return "broken"
    return "passed" if all(found["checks"].values()) else "failed"


def run_part(name: str, device: str, model: Path, stock: Path, limit_s: float) -> dict[str, Any]:
    """Run one part in a process group of its own, which ends with it."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu.parts", name, "--device", device]
        command += ["--model", str(model), "--stock", str(stock), "--out", str(out)]
        with log.open("wb") as writer:
            process = subprocess.Popen(command, stdout=writer, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | str = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                code = "no result in time"
            finally:
                _kill_group(process)
        found = {"seconds": time.monotonic() - begin_s}
        if code == 0:
            return found | json.loads(out.read_text())
        # Without folders of the borrowed machine.
        text = re.sub(r"/[\w./-]*?/(site-packages|kit|site|patched)/", r"\1/", log.read_text(errors="replace"))
        return found | {"error": f"exit code {code}" if isinstance(code, int) else code, "log": text[-ERROR_CHARS:]}


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ask(device: str) -> dict[str, Any]:
    """Name, memory and measured limits of a GPU. In a process of its own, so that this one holds none of its memory."""
    if device == "cpu":
        return {}
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.limits"], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-ERROR_CHARS:]}


if __name__ == "__main__":
    main()
