"""The example runs as it stands, on a tiny model, and its table says what happened."""

import threading

from click.testing import CliRunner

from examples.speculative_decoding import main, show
from sagellm.engines.base import Generation


def test_the_table(model_folder):
    """The model is its own draft: all that it guesses is right."""
    model = str(model_folder("llama"))
    words = ["--model", model, "--draft", model, "--strategy", "ngram", "--prompt", "a cat", "--prompt", "two dogs"]
    before = step_threads()
    done = CliRunner().invoke(main, [*words, "--new", "20", "--batch", "2", "--rounds", "2", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert set(step_threads()) <= set(before), "the threads of an engine that is closed would slow the next one down"
    table = done.stdout[done.stdout.index("strategy") :]  # LMDeploy may say something before it
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert list(rows) == ["strategy", "none", "ngram", "draft"]
    assert rows["none"][1:] == ["1.00", "0", "0", "-", "1.00", "yes"]
    assert rows["ngram"][-1] == rows["draft"][-1] == "yes"
    drafted, accepted, acceptance, per_step = rows["draft"][2:6]
    # In each round, 19 tokens follow the first one of each answer. They take three steps of four guesses and a token, and
    # one step of three guesses and a token.
    assert (drafted, accepted, acceptance, per_step) == ("60", "60", "100.0%", "4.75")


def step_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sagellm-cpu-step"]


def test_answers_that_differ_are_told(capsys):
    one, other = (Generation(tokens, "length", (0.5, 1.0, 1.5)) for tokens in ((1, 2, 3), (1, 2, 4)))
    show("wrong", [[one, other]], [[one, one]], {"drafted": 4, "accepted": 1, "sequences": 2})
    assert capsys.readouterr().out.split() == ["wrong", "4.0", "1.00", "4", "1", "25.0%", "1.50", "no"]
