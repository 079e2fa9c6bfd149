"""Quality of a model: figures against plain formulas, and planted faults that they must show."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from sagellm.cli import main
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError
from sagellm.evaluate.models import EngineModel, ScoredModel, TransformersModel
from sagellm.evaluate.report import QualityReport, compare_reports, markdown
from sagellm.evaluate.run import Options, divergence, evaluate
from sagellm.models.texts import chunks, fixed_texts, prompts
from tests.commands import run_sagellm

SMALL = Options(tokens=512, chunk=64, answers=6, answer_tokens=8)


class Changed(ScoredModel):
    """A model whose scores are changed."""

    def __init__(self, model, change):
        self.name, self._model, self._change = "changed", model, change

    def logits(self, tokens):
        return self._change(self._model.logits(tokens).copy())

    def answers(self, prompts, num_tokens):
        found = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_tokens):
                tokens.append(int(self.logits(tokens)[-1].argmax()))
            found.append(tokens[len(prompt) :])
        return found

    def close(self):
        pass


@pytest.fixture(scope="module")
def reference(model_folder):
    return TransformersModel("reference", model_folder("llama"), "float32")


def test_the_engine_scores_as_transformers_does(start_engine, reference):
    engine = start_engine(kv_blocks=128)
    for tokens in (list(range(30, 130)), 7 * list(range(30, 130))):  # the second takes two forward passes
        engine.generate([tokens])  # its blocks are cached, and not used
        logits = engine.prompt_logits(tokens)
        assert logits.shape == (len(tokens), 320) and logits.dtype == np.float32
        assert np.allclose(logits, reference.logits(tokens), atol=1e-4)
    for prompt in ([], [5] * 5000):
        with pytest.raises(EngineError, match="allowed are 1 to 2031"):
            engine.prompt_logits(prompt)


def test_figures_are_those_of_the_plain_formulas(model_folder, reference):
    other = Changed(reference, lambda scores: 0.9 * scores)
    report = evaluate("tiny", model_folder("llama"), [reference, other], SMALL)
    texts = fixed_texts()
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    losses, kls, same = {"prose": [], "code": []}, [], []
    for name in losses:
        tokens = list(getattr(texts, name).encode())[:256]
        ids = [report_token(model_folder, token) for token in tokens]
        for piece in chunks(ids, 64, None):
            with torch.no_grad():
                scores = model(torch.tensor([piece])).logits[0, :-1].double()
            ours, theirs = scores.log_softmax(-1), (0.9 * scores).log_softmax(-1)
            losses[name].append(torch.nn.functional.nll_loss(ours, torch.tensor(piece[1:])).item())
            kls.append((ours.exp() * (ours - theirs)).sum(-1))
            same.append(ours.argmax(-1) == theirs.argmax(-1))
    found = report.of("changed")
    for name, values in losses.items():
        assert report.of("reference").perplexity[name] == pytest.approx(np.exp(np.mean(values)), rel=1e-5)
    assert found.kl_mean == pytest.approx(torch.cat(kls).mean().item(), rel=1e-4)
    assert found.kl_p999 == pytest.approx(torch.cat(kls).quantile(0.999).item(), rel=1e-4)
    assert found.same_top == torch.cat(same).double().mean().item() == 1.0
    assert found.same_answers == 1.0 and found.parted_at == []
    assert report.of("reference").kl_mean == 0.0 and report.of("reference").same_answers is None
    assert report.text.tokens == {"prose": 4 * 63, "code": 4 * 63}


def report_token(model_folder, byte):
    """The id of a byte in the tokenizer of the tests."""
    from transformers import AutoTokenizer

    if not hasattr(report_token, "ids"):
        tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
        report_token.ids = {value: tokenizer(chr(value), add_special_tokens=False).input_ids[0] for value in range(128)}
    return report_token.ids[byte]


def test_a_planted_fault_shows(model_folder, reference):
    def swap(scores):
        """Where the third-likeliest token would be near, it wins."""
        if len(scores) > 20:
            best = scores.argmax(axis=1)
            scores[20:, 7] = scores.max(axis=1)[20:] + 1
            assert (scores.argmax(axis=1)[:20] == best[:20]).all()
        return scores

    report = evaluate("tiny", model_folder("llama"), [reference, Changed(reference, swap)], SMALL)
    found = report.of("changed")
    assert found.kl_mean > 0.1 and found.kl_p999 > found.kl_mean
    assert 20 / 63 <= found.same_top < 0.5 and found.same_answers < 0.5
    assert len(found.parted_at) == round((1 - found.same_answers) * 6) and max(found.parted_at) < 8
    generated = Options(tokens=512, chunk=64, answers=6, answer_tokens=8, generated=True)
    strict = evaluate("tiny", model_folder("llama"), [reference, Changed(reference, swap)], generated).of("changed")
    assert (strict.same_answers, strict.parted_at) == (found.same_answers, found.parted_at), "checked as generated"


def test_divergence_of_equal_rows_is_nothing():
    rows = np.log(np.array([[0.5, 0.25, 0.25], [1 / 3] * 3], dtype=np.float32))
    assert divergence(rows, rows).tolist() == [0.0, 0.0]
    other = np.log(np.array([[0.25, 0.5, 0.25], [1 / 3] * 3], dtype=np.float32))
    assert divergence(rows, other) == pytest.approx([0.25 * np.log(2), 0.0], abs=1e-7)


def test_texts_are_long_enough_and_the_same():
    texts = fixed_texts()
    assert texts == fixed_texts() and len(texts.sha256) == 64
    assert len(texts.prose) == 160_000 and len(texts.code) == 120_000
    assert chunks(list(range(10)), 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert chunks(list(range(10)), 4, 99) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert prompts(list(range(1000)), 3) == prompts(list(range(1000)), 3) != prompts(list(range(1000)), 3, seed=1)


def test_the_default_texts_have_fifty_thousand_tokens_of_the_default_model():
    from transformers import AutoTokenizer

    from sagellm.models import find_model

    tokenizer = AutoTokenizer.from_pretrained(find_model("smollm2").prepare())
    texts = fixed_texts()
    for text in (texts.prose, texts.code):
        assert len(tokenizer(text, verbose=False).input_ids) >= 25_000 + 512


def test_reports_on_different_texts_are_not_compared(model_folder, reference):
    other = Changed(reference, lambda scores: 0.5 * scores)
    one = evaluate("tiny", model_folder("llama"), [reference, other], Options(tokens=128, chunk=32, answers=0))
    rows = compare_reports(one, one)
    assert {row[0] for row in rows} == {"reference", "changed"} and all(row[2] == row[3] for row in rows)
    assert one.of("changed").same_answers is None
    newer = one.model_copy(update={"text": one.text.model_copy(update={"python": "3.99.0"})})
    with pytest.raises(ConfigError, match="about different texts: Python .* and 3.99.0"):
        compare_reports(one, newer)
    with pytest.raises(ConfigError, match="the report has no model 'x'; it has reference, changed"):
        one.of("x")


def test_models_that_cannot_be_compared(model_folder, reference):
    with pytest.raises(ConfigError, match="same name"):
        evaluate("tiny", model_folder("llama"), [reference, reference], SMALL)
    smaller = Changed(reference, lambda scores: scores[:, :300])
    with pytest.raises(ConfigError, match="vocabulary of 300 tokens, reference one of 320"):
        evaluate("tiny", model_folder("llama"), [reference, smaller], SMALL)
    with pytest.raises(ConfigError, match="chunk is 600; allowed are 2 to 512"):
        evaluate("tiny", model_folder("llama"), [reference], Options(chunk=600))


@pytest.mark.slow
def test_the_command_writes_report_and_plots(model_folder, tmp_path, monkeypatch):
    def noisy(*args):  # as LMDeploy's log when it is imported
        print("noise")
        return evaluate(*args)

    monkeypatch.setattr("sagellm.evaluate.run.evaluate", noisy)
    words = ["evaluate", model_folder("llama"), "--tokens", 1024, "--answers", 4, "--answer-tokens", 6, "--out", tmp_path]
    done = CliRunner().invoke(main, [str(word) for word in (*words, "--device", "cpu", "--json")])
    assert done.exit_code == 0, done.output
    report = QualityReport.model_validate_json((tmp_path / "quality.json").read_text())
    assert json.loads(done.stdout)["reference"] == report.reference == "transformers float32"
    assert report.models[1].kl_mean < 1e-6 and report.models[1].same_answers == 1.0
    assert [each.same_in_batch for each in report.models] == [None, 1.0]
    assert (tmp_path / "quality.md").read_text() == markdown(report)
    for name in ("kl.png", "answers.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    against = [*words, "--against", model_folder("qwen2"), "--device", "cpu", "--kv-schema", "int8"]
    done = CliRunner().invoke(main, [str(word) for word in against])
    assert done.exit_code == 0 and "qwen2 float32" in done.stdout and "llama auto, kv schema int8" in done.stdout
    refused = CliRunner().invoke(main, ["evaluate", "nothing"])
    assert refused.exit_code == 2 and refused.stderr.startswith("error: ")


run = partial(run_sagellm, "evaluate")


FEW = ("--device", "cpu", "--tokens", 1024, "--answers", 0)


@pytest.mark.slow
def test_models_of_one_name_are_told_apart(model_folder, tmp_path):
    copy = tmp_path / "other" / "llama"
    shutil.copytree(model_folder("llama"), copy)
    done = run(model_folder("llama"), "--dtype", "float32", "--against", copy, *FEW, "--json")
    assert done.exit_code == 0, done.output
    report = QualityReport.model_validate_json(done.stdout)
    assert [model.name for model in report.models] == ["llama float32 (reference)", "llama float32"]
    assert report.reference == "llama float32 (reference)" and report.of("llama float32").kl_mean < 1e-6
    copy = tmp_path / "transformers"
    shutil.copytree(model_folder("llama"), copy)
    assert "transformers float32 (reference)" in run(copy, "--dtype", "float32", *FEW).stdout


def test_models_with_other_tokens_are_refused_before_they_are_loaded(model_folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(model_folder("llama"), other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr("sagellm.evaluate.models.EngineModel", None)
    done = run(model_folder("llama"), "--against", other, *FEW)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert f"{model_folder('llama')} and {other} have different tokenizers: of one text they make" in done.stderr


def test_two_reports_are_compared(model_folder, reference, tmp_path):
    other = Changed(reference, lambda scores: 0.5 * scores)
    size = Options(tokens=128, chunk=32, answers=0)
    one = evaluate("tiny", model_folder("llama"), [reference, other], size)
    again = evaluate("tiny", model_folder("llama"), [reference, Changed(reference, lambda scores: 0.9 * scores)], size)
    one.write(tmp_path / "one")
    again.write(tmp_path / "again")
    rows = json.loads(run("--compare", tmp_path / "one", tmp_path / "again" / "quality.json", "--json").stdout)
    (row,) = [row for row in rows if (row["model"], row["figure"]) == ("changed", "mean KL")]
    assert (row["one"], row["other"]) == (one.of("changed").kl_mean, again.of("changed").kl_mean)
    table = run("--compare", tmp_path / "one", tmp_path / "again")
    assert table.exit_code == 0 and f"{one.of('changed').kl_mean:.6g}" in table.stdout
    newer = one.model_copy(update={"text": one.text.model_copy(update={"python": "3.99.0"})})
    newer.write(tmp_path / "newer")
    alien = one.model_copy(update={"models": [one.models[0].model_copy(update={"name": "alien"})]})
    alien.write(tmp_path / "alien")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text((tmp_path / "one" / "quality.json").read_text()[:99])
    for name, words in {
        "newer": "about different texts",
        "alien": "no model of the same name: one has reference, changed, the other alien.",
        "empty": "quality.json cannot be read: No such file or directory; give the folder of a report.",
        "cut.json": "cut.json is no report of quality: the file: Invalid JSON",
    }.items():
        refused = run("--compare", tmp_path / "one", tmp_path / name)
        assert refused.exit_code == 2 and words in refused.stderr and refused.stderr.count("\n") == 1


def test_what_evaluate_is_given_must_fit(tmp_path):
    assert "give the MODEL to measure, or two reports with --compare" in run().stderr
    for words in (["smollm2"], ["--tokens", 2000]):
        refused = run(*words, "--compare", tmp_path, tmp_path)
        assert refused.exit_code == 2 and "takes no MODEL and only --json" in refused.stderr


def test_an_answer_that_a_batch_changes_is_counted(model_folder, reference):
    class Batched(Changed):
        def sampled(self, prompts, num_tokens, together):
            return [[len(prompt), int(together and number == 0)] for number, prompt in enumerate(prompts)]

    other = Batched(reference, lambda scores: scores)
    report = evaluate("tiny", model_folder("llama"), [reference, other], Options(1024, answers=16, answer_tokens=2))
    assert report.of(other.name).same_in_batch == 0.75


@pytest.mark.slow
def test_the_default_model_in_float32_answers_as_transformers_generates():
    """Six answers of 32 tokens; the benchmark has two hundred of 64."""
    from sagellm.models import find_model

    folder = find_model("smollm2").prepare()
    with (
        TransformersModel("transformers", folder, "float32") as expected,
        EngineModel("engine", SageConfig(model=folder, dtype="float32", device="cpu")) as engine,
    ):
        report = evaluate("smollm2", folder, [expected, engine], Options(256, answers=6, answer_tokens=32, generated=True))
    assert report.of("engine").same_answers == 1.0 and report.of("engine").kl_mean < 1e-6
    assert report.of("engine").same_in_batch == 1.0
