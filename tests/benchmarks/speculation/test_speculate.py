"""The comparison of strategies: its prompts, its model, and a whole run of it on a tiny one, in this process."""

import itertools
import json
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from benchmarks import speculate
from benchmarks.speculation.chain_model import CYCLE, FIRST, successors, write_chain_model
from benchmarks.speculation.texts import EDITED, ChainTexts, DemoTexts
from sagellm.demo_model import corpus
from sagellm.demo_model.random_model import write_random_model
from tests.conftest import SHAPE

VOCABULARY = FIRST + 2 * CYCLE
NEW = 24


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    shape = SHAPE | {"vocab_size": VOCABULARY, "num_layers": 1}
    folder = tmp_path_factory.mktemp("chain") / "model"
    return write_chain_model(write_random_model(folder, architecture="qwen2", tie_embeddings=True, **shape))


def continuation(token, count):
    following, found = successors(VOCABULARY), []
    for _ in range(count):
        token = int(following[token])
        found.append(token)
    return found


def test_each_token_has_one_successor():
    following = successors(VOCABULARY)
    assert sorted(following.tolist()) == list(range(VOCABULARY)) and following[:FIRST].tolist() == list(range(FIRST))
    for start in (FIRST, VOCABULARY - 1):
        circle = continuation(start, CYCLE)
        assert len(set(circle)) == CYCLE and circle[-1] == start and min(circle) >= FIRST


def test_prompts_of_the_chain_model():
    texts = ChainTexts(VOCABULARY)
    copy, again, other = (texts.prompts("copy", 3, seed) for seed in (1, 1, 2))
    assert copy == again != other and len(copy) == 3
    for prompt in copy:
        text = [prompt[-1], *continuation(prompt[-1], CYCLE - 1)]
        changed = np.mean(np.array(prompt[:-1]) != text)
        assert 0.5 * EDITED < changed < 1.5 * EDITED
    for prompt in texts.prompts("random", 2, 1):
        assert sorted(prompt[:-1]) == sorted(continuation(prompt[-1], CYCLE))
        pairs = itertools.pairwise(prompt)
        assert sum(continuation(one, 1) == [two] for one, two in pairs) < 0.02 * CYCLE, "what stood behind a token misleads"


def test_prompts_of_the_demo_model(model_folder, monkeypatch):
    folder = model_folder("llama")
    asked = [corpus.Chat(f"question {number}", "answer") for number in range(20)]
    monkeypatch.setattr(corpus, "build_corpus", lambda recipe: SimpleNamespace(chats=asked))
    tokenizer, seen = AutoTokenizer.from_pretrained(folder), []

    def answer(prompts):
        """To every third question the model says something else when it stands behind an answer."""
        seen.append(prompts)
        text = "def answer{}(self, one, two, three):\n    return one + two"
        other = "".join(map(chr, range(97, 123)))
        return [
            tokenizer.encode(other if len(seen) == 2 and number % 3 == 0 else text.format(number))
            for number in range(len(prompts))
        ]

    texts = DemoTexts(folder)
    texts.begin("fresh", answer)
    fresh = texts.prompts("fresh", 12, 0) + texts.prompts("fresh", 8, 1)
    assert not seen and len({tuple(prompt) for prompt in fresh}) == 20
    with pytest.raises(ValueError, match="every question"):
        texts.prompts("fresh", 1, 2)
    texts.begin("copy", answer)
    copies = texts.prompts("copy", 6, 0) + texts.prompts("copy", 7, 1)
    assert seen[0] == fresh and len({tuple(prompt) for prompt in copies}) == 13
    with pytest.raises(ValueError, match="every question"):
        texts.prompts("copy", 1, 2)
    kept = [number for number in range(20) if number % 3]
    for number, long in zip(kept, copies, strict=True):
        text = tokenizer.decode(long)
        question = next(chat.user for chat in asked if f"{chat.user}<" in tokenizer.decode(fresh[number]))
        assert text.count(question) == 2 and text.count(f"def answer{number}(") == 1
    texts.begin("copy", answer)
    assert texts.prompts("copy", 13, 0) == copies and len(seen) == 2, "who is asked anew gets them anew"
    letters = [texts.prompts("random", 2, seed) for seed in (3, 3, 4)]
    assert letters[0] == letters[1] != letters[2] and all(len(prompt) > 200 for prompt in letters[0])


class InThisProcess:
    """A contestant that needs no start-up; keeps what it was asked and answered."""

    every: ClassVar = []

    def __init__(self, name, build, *args):
        self.name, self.state, self.answers = name, build(*args), []
        self.every.append(self)

    def ask(self, request):
        self.answers.append((request, self.state(request)))
        return self.answers[-1][1]

    def close(self):
        self.state.close()


def test_a_whole_run(chain, monkeypatch, tmp_path):
    new = {work: {"0.5B": NEW} for work in ("copy", "random")}
    for name, value in {"Contestant": InThisProcess, "VOCABULARY": VOCABULARY, "NEW": new}.items():
        monkeypatch.setattr(speculate, name, value)
    monkeypatch.setattr(speculate, "_model", lambda model, scratch: chain)
    monkeypatch.setattr(InThisProcess, "every", [])
    out = tmp_path / "out.json"
    words = ["--model", "0.5B", "--strategy", "ngram", "--batch", "2", "--rounds", "2", "--threads", "1", "--out", str(out)]
    done = CliRunner().invoke(speculate.main, [*words, "--options", '{"ngram": {"lookahead": 3}}'])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    copy, random = result["cells"]
    assert [(cell["work"], cell["batch"], list(cell["strategies"])) for cell in (copy, random)] == [
        ("copy", 2, ["ngram"]), ("random", 2, ["ngram"]),
    ]  # fmt: skip
    rows = [cell["strategies"]["ngram"] for cell in (copy, random)]
    assert all(row["equal"] == 1 and row["faults"] == 0 and 0 < row["propose_share"] < 1 for row in rows)
    assert rows[0]["acceptance"] > 0.6 and 2 < rows[0]["tokens_per_step"] <= 4
    assert rows[1]["acceptance"] < 0.1 and 1 <= rows[1]["tokens_per_step"] < 1.1
    assert "copy, batch 2: none" in done.output and done.output.count("100.0%") == 2

    assert [each.name for each in InThisProcess.every] == ["none", "ngram"] * 2, "engines that remember nothing, for each cell"
    for none, ngram in (InThisProcess.every[:2], InThisProcess.every[2:]):
        assert len(none.answers) == len(ngram.answers) == 1 + 2, "a round to warm up, and two"
        for request, answer in none.answers:
            prompts = [prompt for prompts in request["batches"] for prompt in prompts]
            assert [list(tokens) for tokens in answer["tokens"]] == [continuation(each[-1], NEW) for each in prompts]
            assert answer["tokens_per_s"] > 0 and not any(answer["counts"].values())
        assert [request for request, _ in none.answers] == [request for request, _ in ngram.answers]


def test_figures_add_up():
    """Two rounds: twice as fast as none, then four times; one answer of four is another one."""

    def round_of(speed, tokens, **counts):
        return {"tokens_per_s": speed, "cpu_s": 10 / speed, "tokens": tokens, "counts": counts}

    counts = dict(drafted=8, accepted=3, sequences=6, propose_s=1.0, step_s=3.0, faults=0)
    found = speculate._figures(
        [[round_of(20.0, [(1, 2), (3,)], **counts)], [round_of(40.0, [(1, 2), (4,)], **counts)]],
        [[round_of(10.0, [(1, 2), (3,)])], [round_of(10.0, [(1, 2), (3,)])]],
    )
    assert found["times_none"]["median"] == found["times_none_cpu"]["median"] == 3.0
    assert found["acceptance"] == 3 / 8 and found["tokens_per_step"] == 1.5 and found["propose_share"] == 0.25
    assert found["equal"] == 0.75 and found["processes"] == [3.0]


def test_several_processes_of_each():
    """Each round by its median process; each process by the median one without guesses."""

    def told(*speeds):
        counts = dict.fromkeys(("drafted", "accepted", "sequences", "propose_s", "step_s", "faults"), 0)
        return [{"tokens_per_s": speed, "cpu_s": 1 / speed, "tokens": [(1,)], "counts": counts} for speed in speeds]

    found = speculate._figures([told(9.0, 10.0, 14.0), told(18.0, 20.0, 22.0)], [told(8.0, 10.0, 12.0), told(20.0, 21.0, 19.0)])
    assert found["times_none"]["median"] == 1.0 and found["equal"] == 1.0
    assert found["processes"] == pytest.approx([0.9, 1.0, 1.25])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--work", "copy,sing"], "sing: no work of demo; known are copy, fresh, random"),
        (["--strategy", "nobody"], "known are: chain, draft"),
        (["--strategy", "ngram", "--options", '{"suffix": {}}'], "names suffix; measured are ngram"),
        (["--options", '{"ngram": 3}'], "ngram has 3"),
        (["--options", "{"], "JSON"),
    ],
)
def test_misuse(monkeypatch, words, message):
    monkeypatch.setattr(speculate, "_model", lambda model, scratch: pytest.fail("something is measured"))
    done = CliRunner().invoke(speculate.main, words)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
