"""Makes the bundle: a folder that proves this checkout on a machine with a GPU, where nothing can be downloaded.

    python -m benchmarks.gpu.bundle --out FOLDER [--python 3.12]

It holds LMDeploy's Python files as shipped, this checkout, the demo model in bfloat16, wheels of what LMDeploy's engine
imports, and `start.py`. The machine brings CMake, a C++ compiler and the packages of `BROUGHT`.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from benchmarks.machine import describe

ROOT = Path(__file__).parents[2]
MAX_MB = 50
# By the machine, as every image for PyTorch does; the last row is for servers, which the kit does not start.
BROUGHT = (
    "torch", "triton", "numpy", "pillow", "aiohttp",
    "openai", "openai_harmony", "fastapi", "starlette", "uvicorn", "hf_xet",
)  # fmt: skip
BUILD = ("scikit-build-core>=1.1,<2", "pybind11>=3.0,<4")
SOURCE = ("sagellm", "patches", "benchmarks", "pyproject.toml", "README.md", "LICENSE")
PLATFORMS = [f"manylinux{each}_x86_64" for each in ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")]


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="New or empty folder.")
@click.option("--python", "version", default="3.12", show_default=True, help="Python of the machine.")
def main(out: Path, version: str) -> None:
    """Make the bundle."""
    from sagellm.demo_model import ensure_demo_model

    if out.is_dir() and any(out.iterdir()):
        raise click.ClickException(f"{out} is not empty; name another folder.")
    (out / "wheels").mkdir(parents=True)
    download_wheels(out / "wheels", version)
    write_source(out / "source.tar.gz")
    write_lmdeploy(out / "lmdeploy.tar.gz")
    write_model(ensure_demo_model(), out / "demo")
    shutil.copy(Path(__file__).with_name("start.py"), out)
    (out / "bundle.json").write_text(json.dumps({"commit": describe()["commit"], "python": version}) + "\n")
    size_mb = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    click.echo(f"{out}: {size_mb:.1f} MB")
    if size_mb > MAX_MB:
        raise click.ClickException(f"the bundle may have {MAX_MB} MB.")


def download_wheels(folder: Path, version: str) -> None:
    """Download what LMDeploy and this package import, for another Python and without what the machine brings."""
    pins = ROOT / "third_party" / "requirements"
    wanted = [
        line for line in (pins / "cpu.txt").read_text().splitlines()
        if line and not line.startswith(("#", "torch==", "triton=="))
    ]  # fmt: skip
    xgrammar = [line for line in (pins / "no-deps.txt").read_text().splitlines() if line.startswith("xgrammar")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    pip += ["--python-version", version, "--implementation", "cp"]
    pip += [option for each in PLATFORMS for option in ("--platform", each)]
    for more in ([*wanted, *BUILD], ["--no-deps", *xgrammar]):
        subprocess.run([*pip, *more], check=True)
    for wheel in folder.glob("*.whl"):
        if wheel.name.split("-")[0].lower() in BROUGHT:
            wheel.unlink()


def write_model(source: Path, folder: Path) -> None:
    """Copy a model, with its weights in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (file,) = source.glob("*.safetensors")
    weights = {name: values.to(torch.bfloat16) for name, values in load_file(file).items()}
    save_file(weights, folder / file.name, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}, indent=1))


def write_source(file: Path) -> None:
    """Pack the tracked files of this checkout, as they are now, without recorded results."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *SOURCE], check=True, capture_output=True, text=True)
    with tarfile.open(file, "w:gz") as writer:
        for name in listed.stdout.splitlines():
            if not name.startswith("benchmarks/results/") and (ROOT / name).is_file():
                writer.add(ROOT / name, name)


def write_lmdeploy(file: Path) -> None:
    """Pack the Python files of the installed LMDeploy, with the patches taken out."""
    from sagellm.patching import reverse

    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "lmdeploy"
        source = Path(find_spec("lmdeploy").origin).parent
        shutil.copytree(source, tree, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        reverse(Path(scratch))
        with tarfile.open(file, "w:gz") as writer:
            writer.add(tree, "lmdeploy")


if __name__ == "__main__":
    main()
