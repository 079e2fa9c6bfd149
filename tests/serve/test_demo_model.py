"""A server without `--model`, as who tries it first has one."""

import subprocess
import sys
from pathlib import Path

import pytest

from sagellm import demo_model
from sagellm.core.config import SageConfig
from sagellm.serve.server import _model

ASK = [{"role": "user", "content": "Write a function that returns the sum of two numbers."}]


def test_the_demo_model_is_the_one_without_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda: tmp_path)
    assert _model(SageConfig()) == (tmp_path, "sagellm-demo")
    assert _model(SageConfig(model=Path("/models/other"))) == (Path("/models/other"), "other")


@pytest.mark.slow
def test_the_demo_model_answers_with_python(launch):
    subprocess.run([sys.executable, "-m", "sagellm.demo_model"], check=True)  # longer than a server may take to start
    server = launch(model=None).ready()
    with server.client() as client:
        answer = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=60, temperature=0)
    (choice,) = answer.choices
    assert "def " in choice.message.content and "\N{REPLACEMENT CHARACTER}" not in choice.message.content
    server.end()
