"""Kinds whose start takes minutes of a core: a prefill/decode group, and vLLM's own server."""

import json
import os

import httpx
import pytest
from click.testing import CliRunner

from benchmarks.processes import wait_until
from sagellm.cli import main
from sagellm.control_plane.contract import ENGINE_SUITE
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.registry import make_engine
from sagellm.control_plane.scaling_replay import verify_scaling
from tests.control_plane.test_gateway import ask
from tests.control_plane.test_scaling import CONTENT

pytestmark = pytest.mark.slow
VLLM = os.environ.get("SAGELLM_VLLM")


def faults(kind, **options):
    report = ENGINE_SUITE.check(lambda: make_engine(kind, **options))
    return [result for result in report.results if not result.passed]


def test_a_group_keeps_to_the_contract(model_folder):
    flags = ["--device", "cpu", "--threads", "1", "--kv-blocks", "64", "--block-size", "16"]
    assert not faults("group", model=str(model_folder("llama")), flags=flags)


def test_a_real_group_says_its_load_and_its_roles_grow_by_the_policy_sla(model_folder, tmp_path):
    """Targets that no engine can meet add a prefill engine; easy ones leave the decode engine alone."""
    flags = ["--device", "cpu", "--threads", "1", "--kv-blocks", "64", "--block-size", "16", "--model-name", "tiny"]
    split = {"kind": "group", "model": str(model_folder("llama")), "policy": "always-split", "flags": flags}
    pool = {"policy": "sla", "max": 2, "interval_s": 0.5, "cooldown_s": 0.0}
    scaling = {
        "split-prefill": pool | {"options": {"profile": CONTENT, "ttft_ms": 0.001}},
        "split-decode": pool | {"options": {"profile": CONTENT, "ttft_ms": 1e6, "itl_ms": 1e6}},
    }
    engines = {"split": split, "alone": {"kind": "sagellm", "model": split["model"], "model_name": "one", "device": "cpu",
                                         "threads": 1, "kv_blocks": 64, "block_size": 16}}  # fmt: skip
    record = tmp_path / "record.jsonl"
    settings = {"port": 0, "check_interval_s": 0.2, "engines": engines, "scaling": scaling, "record": record}
    with ControlPlaneManager(publish=False, **settings) as manager:
        def rows():
            return {one["name"]: one for one in manager.engines()}

        prompts = [f"prompt {number} of the test, of some length" for number in range(4)]
        texts = [ask(manager, model=model, prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True).json()["choices"][0]
                 for model in ("tiny", "one") for prompt in prompts]  # fmt: skip
        assert [one["text"] for one in texts[:4]] == [one["text"] for one in texts[4:]]
        assert {one["reason"] for one in manager.status()["decisions"] if one.get("group")} == {"split"}
        wait_until("sums", lambda: rows()["split"]["load"].get("ended") == 4)
        load, decode = rows()["split"]["load"], rows()["split-decode-1"]["load"]
        assert load["output_tokens"] == decode["output_tokens"] == 48 and load["prompt_tokens"] > 4 * len(prompts)
        assert load["running"] == load["waiting"] == 0 and 0 <= load["kv_use"] <= 1 and load["first_token_s"] > 0
        assert [rows()[name]["device"] for name in ("split", "split-prefill-1", "split-decode-1")] == ["cpu"] * 3
        page = httpx.get(f"{manager.url}/metrics").text
        assert 'sagellm_control_engine_load{engine="split-decode-1",figure="ended",group="split",role="decode"} 4.0' in page
        wait_until("a second prefill engine", lambda: rows().get("split-prefill-2", {}).get("state") == "ready", 120)
        assert "split-decode-2" not in rows()
        prompts = [ask(manager, model="tiny", prompt=f"{prompt} again", max_tokens=4).status_code for prompt in prompts]
        assert prompts == [200] * 4
        text = CliRunner().invoke(main, ["engine", "list", "--json", "--url", manager.url]).output
        assert {one["name"] for one in json.loads(text)} >= {"split", "split-prefill-1", "split-prefill-2", "split-decode-1"}
    steps = [line for line in map(json.loads, record.read_text().splitlines()) if line["event"] == "scale"]
    views = {role: [line["view"] for line in steps if line["view"]["role"] == role] for role in ("prefill", "decode")}
    for role, num in (("prefill", 1), ("decode", 12)):
        ended = next(view for view in views[role] if view["num_ended"])
        assert ended["output_tokens"] == num and ended["prompt_tokens"] > 5, role
    assert any(view["itl_s"] for view in views["decode"]) and any(view["ttft_s"] for view in views["prefill"])
    assert verify_scaling(record).agrees


def test_our_server_keeps_to_the_contract(model_folder):
    assert not faults("sagellm", model=str(model_folder("llama")), device="cpu", threads=1, kv_blocks=64)


@pytest.mark.skipif(VLLM is None, reason="SAGELLM_VLLM does not name the command or the interpreter of vLLM")
@pytest.mark.filterwarnings("default")
def test_vllm_keeps_to_the_contract(tmp_path):
    from sagellm.demo_model.random_model import write_random_model

    folder = tmp_path / "model"
    write_random_model(folder, architecture="llama", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
                       intermediate_size=256, vocab_size=320)  # fmt: skip
    flags = ["--max-model-len", "256", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
    assert not faults("vllm", model=str(folder), executable=VLLM, model_name="tiny", flags=flags)
