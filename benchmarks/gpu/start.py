"""Sets a bundle up on a machine that reaches no package index, and runs the kit there. Needs Python and its torch alone.

    python3 start.py --out FOLDER [--device cuda] [--minutes 9] [--parts NAME,...]

It installs the wheels beside each other, compiles the native core, and applies the patches to a copy of LMDeploy. The other
copy stays as shipped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPARE_S = 20  # for the last files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report and the log of the set-up")
    parser.add_argument("--device", default="cuda", help="device of LMDeploy (default: cuda)")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for set-up and parts (default: 9.5)")
    parser.add_argument("--parts", help="names separated by commas (default: all)")
    parser.add_argument("--name", default="device", help="name of the report's files (default: device)")
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    bundle = json.loads((HERE / "bundle.json").read_text())
    version = ".".join(map(str, sys.version_info[:2]))
    if version != bundle["python"]:
        print(f"this is Python {version}; the bundle is for {bundle['python']}. Make one with --python {version}.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sagellm-kit-") as folder, (options.out / "setup.log").open("w") as log:
        root = Path(folder)
        try:
            environment = set_up(root, log)
        except subprocess.CalledProcessError as error:
            log.flush()
            print(f"set-up failed: {error}")
            print((options.out / "setup.log").read_text()[-4000:])
            return 2
        minutes = max(0.1, (end_s - SPARE_S - time.monotonic()) / 60)
        command = [sys.executable, "-m", "benchmarks.gpu.kit", "--device", options.device, "--model", str(HERE / "demo")]
        command += ["--stock", str(root / "stock"), "--out", str(options.out.resolve()), "--name", options.name]
        command += ["--bundle", str(HERE / "bundle.json"), "--minutes", f"{minutes:.2f}"]
        command += ["--parts", options.parts] if options.parts else []
        return subprocess.run(command, env=environment, cwd=root / "kit").returncode


def set_up(root: Path, log) -> dict:
    """Install everything below `root`, and return the environment of the kit. Raises CalledProcessError."""
    site, source = root / "site", root / "source"
    paths = [root / "patched", site, root / "kit"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip

    def run(*command: str) -> None:
        begin_s = time.monotonic()
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
        print(f"{' '.join(command[1:4])}: {time.monotonic() - begin_s:.0f} s", flush=True)

    for archive, folder in (("source", source), ("lmdeploy", root / "stock"), ("lmdeploy", root / "patched")):
        with tarfile.open(HERE / f"{archive}.tar.gz") as reader:
            reader.extractall(folder)
    (root / "kit").mkdir()
    shutil.copytree(source / "benchmarks", root / "kit" / "benchmarks")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-cache-dir", "--target", str(site)]
    run(*pip, "--no-compile", *sorted(map(str, (HERE / "wheels").glob("*.whl"))))
    run(*pip, "--no-build-isolation", str(source))
    run(sys.executable, "-m", "sagellm.patching", "--target", str(root / "patched"))
    return environment


if __name__ == "__main__":
    sys.exit(main())
