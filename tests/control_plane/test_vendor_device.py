"""A device that a package brings, all the way: installed, named by doctor, checked, served, and preferred by the router."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from openai import OpenAI

from sagellm.accel.kernels.domestic import find_vendor, probe
from sagellm.cli import checks, main
from sagellm.control_plane.base import EngineView, RouteRequest
from sagellm.control_plane.routers.order import Order
from sagellm.core.config import SageConfig
from sagellm.core.devices import NO_REPORT, DeviceReport, device_names, is_brought, package_of
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities
from tests.control_plane.endpoint import Endpoint
from tests.serve.harness import ServerProcess
from tests.vendor import install

SETTINGS = {"dtype": "float32", "threads": 1, "kv_blocks": 64, "block_size": 16, "model_name": "tiny"}


@pytest.fixture
def env(tmp_path, monkeypatch):
    """The environment of processes that see the package; this process sees it too."""
    found = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, found[name])
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
        del sys.modules[name]


def sagellm(env, *words):
    return subprocess.run([Path(sys.executable).with_name("sagellm"), *words], env=env, capture_output=True, text=True)


def row():
    (found,) = [each for each in checks.extensions() if each.name == "device acme"]
    return found


def serve(env, folder, model):
    options = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    return ServerProcess(folder, "--device", "acme", "--model", model, *options, env=env | {"ACME_MARK": str(folder / "mark")})


@pytest.mark.slow
def test_from_the_package_to_the_router(env, tmp_path, model_folder, start_manager):
    assert row().state == checks.NOTE and row().command == "sagellm check device acme" and "acme-device 1.0" in row().text
    checked = sagellm(env, "check", "device", "acme", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    report = DeviceReport.read("acme")
    assert report.dtypes == ("float32", "bfloat16") and not report.broken and "LoRA" in report.missing
    assert row().state == checks.OK and row().command == "sagellm serve --device acme"

    model = str(model_folder("llama"))
    folder = tmp_path / "server"
    server = serve(env, folder, model)
    manager = start_manager(router="order", router_options={"order": ["acme", "cpu"]})
    with Endpoint("tiny") as other:
        manager.register_engine("cpu", "openai", url=other.url, device="cpu")
        try:
            server.ready()
            manager.register_engine("acme", "openai", url=server.url)
            acme = engine(manager)
            assert (acme["device"], acme["models"]) == ("acme", ["tiny"]) and len(acme["routes"]) == 3
            assert acme["capabilities"]["dtypes"] == ["float32", "bfloat16"] and "awq" in acme["capabilities"]["quantization"]
            assert NO_REPORT not in acme["capabilities"]["missing"]
            assert answer(manager) == ("acme", "preferred device")
            assert (folder / "mark").exists()  # the kernel of the package has run
            manager.unregister_engine("acme")
        finally:
            server.kill()


def engine(manager):
    return next(one for one in manager.engines() if one["name"] == "acme")


def answer(manager):
    """Ask the gateway, and return the engine that it chose, with the reason."""
    with OpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        assert client.completions.create(model="tiny", prompt="a device", max_tokens=12, temperature=0).choices[0].text
    last = manager.status()["decisions"][-1]
    return last["engine"], last["reason"]


@pytest.mark.slow
def test_an_upgraded_package_is_not_preferred_until_it_is_checked(env, tmp_path, model_folder, start_manager):
    DeviceReport("acme", "acme-device 1.0", ("float32",)).write()
    assert row().state == checks.OK
    manager = start_manager(router="order", router_options={"order": ["acme", "cpu"]})
    install(tmp_path / "site", version="2.0")
    assert row().state == checks.NOTE and "acme-device 2.0 was not checked here" in row().text
    with Endpoint("tiny") as other:
        manager.register_engine("cpu", "openai", url=other.url, device="cpu")
        manager.register_engine("acme", "sagellm", model=str(model_folder("llama")), device="acme", **SETTINGS)
        acme = engine(manager)
        assert acme["device"] == "acme" and "sagellm check device acme" in acme["capabilities"]["missing"][NO_REPORT]
        assert acme["capabilities"]["dtypes"] == []
        assert answer(manager) == ("cpu", "preferred device")
        manager.unregister_engine("cpu")
        assert answer(manager) == ("acme", "no preferred device")


@pytest.mark.slow
def test_a_faulty_kernel_is_found_and_the_device_not_preferred(env):
    checked = sagellm(env | {"ACME_FAULT": "1"}, "check", "device", "acme", "--json")
    assert checked.returncode == 1
    broken = {rule["rule"] for rule in json.loads(checked.stdout)["rules"] if not rule["passed"]}
    assert broken == {"activations", "architectures"}
    assert set(DeviceReport.read("acme").broken) == broken
    assert row().state == checks.NOTE and "it breaks activations" in row().text


def test_a_report_speaks_for_its_device_and_version_alone(env, tmp_path):
    assert is_brought("acme") and package_of("acme") == "acme-device 1.0" and "acme" in device_names()
    assert pytorch_capabilities("acme").dtypes == () and "was not checked" in DeviceReport.problem("acme")
    missing = {"LinearW4A16": "no such kernel"}
    file = DeviceReport("acme", "acme-device 1.0", ("bfloat16",), missing).write()
    found = pytorch_capabilities("acme")
    assert found.dtypes == ("bfloat16",) and NO_REPORT not in found.missing and found.tensor_parallel
    assert found.quantization == ("smooth_quant", "fp8") and "LinearW4A16" in found.missing["quantization awq"]
    assert "eagle" in str(found.missing) and found.roles == ()
    DeviceReport("acme", "acme-device 1.0", ("bfloat16",), broken={"memory": "0 of 0 bytes"}).write()
    assert "it breaks memory" in pytorch_capabilities("acme").missing[NO_REPORT]
    DeviceReport("acme", "acme-device 0.9", ("bfloat16",)).write()
    assert DeviceReport.read("acme") is None
    for words in ("", "[]", '{"device": "acme"}'):
        file.write_text(words)
        assert DeviceReport.read("acme") is None
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    with pytest.raises(ConfigError, match="report of device acme cannot be kept"):
        DeviceReport("acme", "acme-device 1.0", ()).write()


def test_the_router_prefers_a_device_that_was_checked():
    router = Order(["acme", "cpu"])
    good = EngineView("a", "hybrid", device="acme", num_running=3)
    views = [good, EngineView("c", "hybrid", device="cpu")]
    assert router.choose(RouteRequest(5), views) == ("a", "preferred device", "acme, 3 requests there")
    unchecked = good.capabilities.model_copy(update={"missing": {NO_REPORT: "not checked"}})
    bad = EngineView("a", "hybrid", device="acme", capabilities=unchecked)
    assert router.choose(RouteRequest(5), [bad, views[1]]).engine == "c"
    assert router.choose(RouteRequest(5), [bad]) == ("a", "no preferred device", "acme, unchecked, 0 requests there")


def test_doctor_names_the_device_of_a_vendor_without_a_back_end(env, tmp_path):
    """The package says that its device is for Kunlunxin's cards."""
    (tmp_path / "machine/dev").mkdir(parents=True)
    (tmp_path / "machine/dev/xpu0").touch()
    (found,) = probe(tmp_path / "machine", modules=[])
    assert found.vendor == find_vendor("kunlun")
    (finding,) = checks.accelerators(tmp_path / "machine", modules=[])
    assert "LMDeploy has no back end for it, a package brings device acme" in finding.text


def test_an_unknown_device(env):
    with pytest.raises(ValueError, match="unknown device 'acne'; known are auto, cpu, cuda, ascend, maca, camb, acme"):
        SageConfig(device="acne")
    assert SageConfig(device="acme").device == "acme"


def test_a_device_that_cannot_be_loaded_is_a_note(env, tmp_path):
    (tmp_path / "site/acme_device/device.py").write_text("raise OSError('libacme.so: cannot open')")
    assert row().state == checks.NOTE and "acme-device 1.0 cannot be used" in row().text and "libacme.so" in row().text
    done = CliRunner().invoke(main, ["list", "device", "--json"])
    assert done.exit_code == 0 and "libacme.so" in done.output
