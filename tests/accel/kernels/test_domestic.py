"""Made-up machines below a folder: device files, compiled libraries and installed modules of each vendor."""

import subprocess
from pathlib import Path

import pytest

from sagellm.accel.kernels.domestic import VENDORS, find_vendor, probe
from sagellm.accel.kernels.domestic.probe import loader_folders
from sagellm.cli import checks
from sagellm.core.errors import ConfigError

NODES = {
    "nvidia": "nvidia0", "amd": "kfd", "ascend": "davinci0", "cambricon": "cambricon_dev0", "metax": "mxcd", "hygon": "mkfd",
    "kunlun": "xpu0",
}  # fmt: skip
BUILDS = {"nvidia": "cuda: Optional[str] = '12.8'", "amd": "hip: Optional[str] = '6.4'", "hygon": "hip = '6.1'"}


class Machine:
    """A machine below a folder. `add` installs a vendor's parts as its installers do."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root, self.library, self.modules = root, library, root / "site-packages"
        for folder in (root / "dev", root / "usr/lib", self.modules):
            folder.mkdir(parents=True)

    def add(self, name, parts=("node", "libraries", "torch", "dlinfer"), folder="usr/lib", version=""):
        vendor = find_vendor(name)
        if "node" in parts:
            (self.root / "dev" / NODES[name]).touch()
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for library in vendor.libraries if "libraries" in parts else ():
            (self.root / folder / (library + version)).write_bytes(self.library.read_bytes())
        if "torch" in parts and vendor.plugin:
            (self.modules / f"{vendor.plugin}.py").write_text("raise SystemError('imported')")
        elif "torch" in parts:
            suffix = "+metax3.5" if name == "metax" else ""
            self.write_torch(f"__version__ = '2.8.0{suffix}'\ncuda = None\nhip = None\n{BUILDS.get(name, '')}\n")
        if vendor.needs_dlinfer and "dlinfer" in parts:
            (self.modules / "dlinfer.py").write_text("raise SystemError('imported')")

    def write_torch(self, text):
        (self.modules / "torch").mkdir(exist_ok=True)
        (self.modules / "torch/__init__.py").touch()
        (self.modules / "torch/version.py").write_text(text)

    def probe(self):
        return {found.vendor.name: found for found in probe(self.root, modules=[str(self.modules)])}

    def doctor(self):
        return {each.name: each for each in checks.accelerators(self.root, modules=[str(self.modules)])}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A shared library that loads."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libone.so", folder / "one.c"], check=True)
    return folder / "libone.so"


@pytest.fixture
def machine(tmp_path, library):
    return Machine(tmp_path / "machine", library)


def test_a_machine_without_accelerators(machine):
    machine.write_torch("__version__ = '2.8.0'\ncuda = '12.8'\nhip = None\n")
    assert machine.probe() == {}
    (row,) = machine.doctor().values()
    assert (row.name, row.state) == ("accelerators", checks.NOTE)
    assert all(vendor.title in row.text for vendor in VENDORS)


@pytest.mark.parametrize("name", NODES)
def test_a_whole_installation_lacks_nothing(machine, name):
    machine.add(name)
    found = machine.probe()
    assert list(found) == [name] and found[name].lacks == ()
    vendor = found[name].vendor
    assert [node.name for node in found[name].nodes] == [NODES[name]] and set(found[name].libraries) == set(vendor.libraries)
    row = machine.doctor()[vendor.title]
    assert vendor.collective.upper() in row.text and NODES[name] in row.text
    if vendor.lmdeploy_device:
        assert (row.state, row.command) == (checks.OK, f"sagellm serve --device {vendor.lmdeploy_device}")
        assert ("by dlinfer" if name in ("ascend", "cambricon", "metax") else "natively") in row.text
    else:
        assert row.state == checks.NOTE and "LMDeploy has no back end for it" in row.text and not row.command


PARTS = [(vendor.name, part) for vendor in VENDORS for part in ("node", "libraries", "torch")]
PARTS += [(vendor.name, "dlinfer") for vendor in VENDORS if vendor.needs_dlinfer]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_each_part_that_is_missing_is_named_with_how_to_get_it(machine, name, part):
    vendor = find_vendor(name)
    machine.add(name, {"node", "libraries", "torch", "dlinfer"} - {part})
    lacks = machine.probe()[name].lacks
    expected = {
        "node": ["no device /dev/"], "libraries": [f"no {each}" for each in vendor.libraries], "dlinfer": ["no dlinfer"],
        "torch": [f"no {vendor.plugin}" if vendor.plugin else "torch is not built for it"],
    }[part]  # fmt: skip
    assert len(lacks) == len(expected) and all(lack.what.startswith(want) for lack, want in zip(lacks, expected, strict=True))
    row = machine.doctor()[vendor.title]
    assert row.state == checks.NOTE and not row.command
    assert all(f"{lack.what} ({lack.how})" in row.text for lack in lacks)


def test_a_version_behind_the_name_of_a_library_counts(machine):
    machine.add("hygon", version=".5")
    assert machine.probe()["hygon"].libraries["libgalaxyhip.so"].name == "libgalaxyhip.so.5"


def test_a_library_that_the_loader_does_not_see(machine):
    folder = "usr/local/Ascend/ascend-toolkit/latest/lib64"
    machine.add("ascend", folder=folder)
    first, second = machine.probe()["ascend"].lacks
    assert first.what.endswith("libascend_hal.so is not where the loader looks") and "set_env.sh" in second.how
    configured = machine.root / "etc/ld.so.conf.d/ascend.conf"
    configured.parent.mkdir(parents=True)
    configured.write_text(f"# CANN\n/{folder}\n")
    assert machine.probe()["ascend"].lacks == ()


def test_a_library_that_does_not_load(machine):
    machine.add("cambricon")
    (machine.root / "usr/lib/libcnrt.so").write_bytes(b"no library" * 100)
    (lack,) = machine.probe()["cambricon"].lacks
    assert "libcnrt.so does not load" in lack.what and "invalid ELF header" in lack.what


def test_a_library_that_needs_another_one(machine, tmp_path):
    machine.add("kunlun", ("node", "torch"))
    source, base = tmp_path / "needs.c", tmp_path / "libbase.so"
    base.write_bytes(machine.library.read_bytes())
    source.write_text("int one(void); int two(void) { return 2 * one(); }\n")
    wanted = machine.root / "usr/lib/libxpurt.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", wanted, source, f"-L{tmp_path}", "-lbase"], check=True)
    (lack,) = machine.probe()["kunlun"].lacks
    assert "libbase.so: cannot open shared object file" in lack.what
    base.rename(machine.root / "usr/lib/libbase.so")
    assert machine.probe()["kunlun"].lacks == ()


def test_vendors_that_share_a_device_file(machine):
    (machine.root / "dev/kfd").touch()
    assert list(machine.probe()) == ["amd"]
    machine.add("amd", ("libraries",))
    (machine.root / "opt/dtk").mkdir(parents=True)
    assert {name: [node.name for node in found.nodes] for name, found in machine.probe().items()} == {"hygon": ["kfd"]}


def test_a_torch_for_one_vendor_is_no_sign_of_another(machine):
    """MetaX's torch names a version of CUDA too."""
    machine.add("metax")
    machine.write_torch("__version__ = '2.8.0+metax3.5'\ncuda = '11.6'\nhip = None\n")
    assert list(machine.probe()) == ["metax"] and machine.probe()["metax"].lacks == ()


def test_control_files_are_no_devices(machine):
    for name in ("davinci_manager", "cambricon_ctl", "nvidiactl", "xpuctrl", "nvidia-uvm"):
        (machine.root / "dev" / name).touch()
    assert machine.probe() == {}


def test_the_folders_of_this_machines_loader(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/a:/opt/b")
    folders = loader_folders()
    assert folders[:2] == [Path("/opt/a"), Path("/opt/b")] and any((folder / "libc.so.6").exists() for folder in folders)


def test_an_unknown_vendor():
    with pytest.raises(ConfigError, match="known are: nvidia, amd, ascend, cambricon, metax, hygon, kunlun"):
        find_vendor("acme")
