"""The example runs as it stands, on a tiny model, and its table says what happened."""

from click.testing import CliRunner

from examples.speculative_decoding import main, show
from sagellm.engines.base import Generation


def test_the_table(model_folder):
    """The model is its own draft: all that it guesses is right."""
    model = str(model_folder("llama"))
    done = CliRunner().invoke(
        main, ["--model", model, "--draft", model, "--strategy", "ngram", "--new", "20", "--batch", "2", "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    table = done.stdout[done.stdout.index("strategy") :]  # LMDeploy may say something before it
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert list(rows) == ["strategy", "none", "ngram", "draft"]
    assert rows["none"][1:] == ["1.00", "0", "0", "-", "1.00", "yes"]
    assert rows["ngram"][-1] == rows["draft"][-1] == "yes"
    drafted, accepted, acceptance, per_step = rows["draft"][2:6]
    # 19 tokens of each follow the first: two steps of eight guesses and one token, and one token more.
    assert (drafted, accepted, acceptance, per_step) == ("32", "32", "100.0%", "6.33")


def test_answers_that_differ_are_told(capsys):
    one, other = (Generation(tokens, "length", (0.5, 1.0, 1.5)) for tokens in ((1, 2, 3), (1, 2, 4)))
    show("wrong", [one, other], [one, one], {"drafted": 4, "accepted": 1, "sequences": 2})
    assert capsys.readouterr().out.split() == ["wrong", "4.0", "1.00", "4", "1", "25.0%", "1.50", "no"]
