"""A vendor's package, to be installed by tests: the CPU device under the name `acme`, with a kernel of its own."""

import os
import shutil
from pathlib import Path

HERE = Path(__file__).parent


def install(site: Path, version: str = "1.0") -> dict[str, str]:
    """Install the package in a folder, and return the environment in which processes find it."""
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "acme_device", site / "acme_device", ignore=compiled, dirs_exist_ok=True)
    for other in site.glob("*.dist-info"):
        shutil.rmtree(other)
    info = site / f"acme_device-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-device\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[sagellm.devices]\nacme = acme_device:ACME_DEVICE\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"]]), "XDG_CACHE_HOME": str(site.parent / "cache")
    }  # fmt: skip
