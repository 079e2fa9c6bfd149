"""Engines that are started by hand behind `sagellm pd proxy`: real answers, keys, an engine that dies and comes back."""

import json
import signal

import httpx
import pytest
from click.testing import CliRunner

from sagellm.cli import main
from tests.pd.harness import until
from tests.pd.lmdeploys_proxy import ProxiedByOurs
from tests.pd.real_group import body_of, tokens_of
from tests.serve.harness import KEY

pytestmark = pytest.mark.slow  # `test_proxy.py` has engines that compute nothing


def test_engines_that_are_started_by_hand(tmp_path, model_folder, prompt):
    group = ProxiedByOurs(tmp_path, model_folder("llama"))
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(url, words=prompt):
        return tokens_of(httpx.post(f"{url}/v1/completions", json=body_of(words, 8), headers=headers, timeout=60))

    def states():
        shown = CliRunner().invoke(main, ["engine", "list", "--json", "--url", group.url, "--api-key", KEY])
        return {one["name"]: one["state"] for one in json.loads(shown.output)}

    try:
        group.ready()
        assert httpx.post(f"{group.url}/v1/completions", json=body_of(prompt, 8), timeout=60).status_code == 401
        assert ask(group.url) == ask(group.decode) and group.arrived() == 1
        assert states() == dict.fromkeys(("pd", "pd-prefill-1", "pd-decode-1"), "ready")
        group.servers["prefill"].kill()
        until("its end is seen", lambda: states()["pd-prefill-1"] in ("failed", "restarting"))
        assert ask(group.url, "another " + prompt) == ask(group.decode, "another " + prompt) and group.arrived() == 1
        group.servers["prefill"].start()
        group.ready()
        assert ask(group.url) == ask(group.decode) and group.arrived() == 2
        group.end()
        group.process.send_signal(signal.SIGTERM)
        assert group.process.wait(60) == 0, group.log.read_text()
    finally:
        group.close()
