"""Devices that packages bring: their names, and the reports of their checks.

A report is what a manager learns of such a device, so it holds what the check saw and no more.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

from sagellm.core.cached_folder import default_cache_dir, write_whole
from sagellm.core.errors import ConfigError
from sagellm.core.packages import entry_points

__all__ = ["DEVICES", "GROUP", "NO_REPORT", "DeviceReport", "device_names", "is_brought", "package_of"]

GROUP = "sagellm.devices"  # of entry points
DEVICES = ("auto", "cpu", "cuda", "ascend", "maca", "camb")  # this project's, and those of LMDeploy
NO_REPORT = "device report"  # feature that a `CapabilityDescriptor` lacks where the device was not checked, or failed


def device_names() -> tuple[str, ...]:
    """Return every name that `--device` takes here."""
    return (*DEVICES, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(DEVICES)))


def is_brought(name: str) -> bool:
    """Whether an installed package brings the device."""
    return name not in DEVICES and _entry(name) is not None


def package_of(name: str) -> str:
    """Return the package that brings a device, with its version; empty where none does."""
    entry = _entry(name)
    return "" if entry is None or entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Findings of `sagellm check device NAME`, kept in the cache folder.

    Attributes:
        package: that brought the device, with its version.
        dtypes: types that it computes in.
        missing: operator -> the reason why the device lacks it.
        broken: rule -> how the device breaks it.
    """

    device: str
    package: str
    dtypes: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    def write(self) -> Path:
        """Keep the report in place of an older one. Raises ConfigError: it cannot be written."""
        file = _file(self.device)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(asdict(self), indent=1))
        except OSError as error:
            raise ConfigError(
                f"the report of device {self.device} cannot be kept in {file.parent}: {error.strerror or error}. Free some "
                "space, or let XDG_CACHE_HOME name a folder that can be written."
            ) from None
        return file

    @classmethod
    def read(cls, device: str) -> "DeviceReport | None":
        """Return the report of a device, or None where the installed version was not checked."""
        try:
            found = json.loads(_file(device).read_text())
            report = cls(**(found | {"dtypes": tuple(found["dtypes"])}))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return report if (report.device, report.package) == (device, package_of(device)) else None

    @classmethod
    def problem(cls, device: str) -> str:
        """Return why a device cannot be relied on, with what to do; empty where its check passed."""
        report = cls.read(device)
        if report is None:
            return f"{package_of(device) or device} was not checked here; run: sagellm check device {device}"
        return f"it breaks {', '.join(report.broken)}; see: sagellm check device {device}" if report.broken else ""


def _entry(name: str) -> EntryPoint | None:
    return next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)


def _file(device: str) -> Path:
    return default_cache_dir() / "devices" / f"{device}.json"
