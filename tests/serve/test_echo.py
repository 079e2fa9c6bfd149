"""Echoes of prompts: texts and scores of their tokens, and what happens where none come."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sagellm.serve.choices import Plan, answer_several
from sagellm.serve.echo import echo_of
from sagellm.serve.generation import GuardedGeneration
from sagellm.serve.parameters import Refused
from sagellm.serve.validation import RequestValidation
from tests.serve.test_units import FakeLMDeploy

BYTES = [f"<0x{number:02X}>" for number in range(256)]
WORDS = ["\u2581Hel", "lo", "\u2581wor", "ld", "\u2581", ".", "l"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def sentence_piece():
    """A tokenizer as Llama 2 has: a BOS token, a first space, and bytes for characters that it does not know."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *BYTES, *WORDS])}
    merges = []
    for word in WORDS:  # pieces of each word, from its left
        for end in range(2, len(word) + 1):
            for part in (word[: end - 1], word[end - 1], word[:end]):
                vocabulary.setdefault(part, len(vocabulary))
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


class Scores:
    """An engine that scores prompts; each token of `even` is as likely as the others of it, and far more than the rest."""

    def __init__(self, tokenizer, even=(), logits=True):
        self.engine, self._even, self._logits = self, list(even), logits
        self.tokenizer = SimpleNamespace(model=SimpleNamespace(model=tokenizer))
        self.cancelled, self.ended, self.wait = [], [], None

    def create_instance(self):
        return self

    async def async_stream_infer(self, session_id, tokens, gen_config):
        if self.wait is not None:
            await self.wait.wait()
        logits = torch.zeros(len(tokens), len(self.tokenizer.model.model))
        logits[:, self._even] = 20.0
        yield SimpleNamespace(logits=logits if self._logits else None, status=None)

    async def async_cancel(self, session_id):
        self.cancelled.append(session_id)

    async def async_end(self, session_id):
        self.ended.append(session_id)


TEXTS = ["Hello world", "Hello \u00e9t\u00e9 \U0001f600.", " Hello", "<s>Hello</s> world", "\u00e9", "Hello. "]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("in_ids", [False, True])
def test_tokens_join_to_the_text_and_offsets_point_into_it(text, in_ids):
    tokenizer = sentence_piece()
    tokens = tokenizer(text)["input_ids"]
    even = [tokenizer.convert_tokens_to_ids(word) for word in ("<0xC3>", "<0xC4>", "\u2581wor", "</s>")]
    echo = asyncio.run(echo_of(Scores(tokenizer, even), tokens, None if in_ids else text, 4, 1))
    found = echo.logprobs
    assert tokens[0] == 1 and "".join(found["tokens"]) == echo.text
    assert echo.text == text or (in_ids and echo.text.startswith("<s>") and echo.text.endswith(text))
    assert {len(values) for values in found.values()} == {len(tokens)}
    places = zip(found["text_offset"], found["tokens"], strict=True)
    assert [echo.text[at : at + len(piece)] for at, piece in places] == found["tokens"]
    assert found["top_logprobs"][0] is None
    for token, piece, row in zip(tokens[1:], found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert len(row) == 4 + (token not in even), "no two tokens have one name"
        assert piece in row and "\ufffd" not in "".join(row)
    plain = asyncio.run(echo_of(Scores(tokenizer), tokens, None if in_ids else text, None, 1))
    assert plain.text == echo.text and plain.logprobs is None


def plan(echo):
    body = {"model": "x"}
    return Plan([body, body], 2, False, False, False, False, lambda number: None, echo)


def run(echo, *messages):
    """Answer a request with an echo; messages come from the client. Return what was sent. No task may be left."""

    async def whole():
        coming: asyncio.Queue = asyncio.Queue()
        for message in messages:
            coming.put_nowait({"type": message})
        sent = []

        async def app(scope, receive, send):
            sent.append("an answer")

        async def send(message):
            sent.append(message)

        try:
            await asyncio.wait_for(answer_several(app, plan(echo), {}, coming.get, send), 10)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
        return sent

    return asyncio.run(whole())


def test_a_client_that_leaves_while_its_prompt_is_scored_ends_that():
    async def whole():
        tokenizer = sentence_piece()
        engine = Scores(tokenizer)
        engine.wait = asyncio.Event()
        guarded = GuardedGeneration(SimpleNamespace(generate=None), lambda: None)
        return engine, lambda left: guarded.run(echo_of(engine, [1, 5], None, 1, 7), left)

    engine, echo = asyncio.run(whole())
    assert run(echo, "http.disconnect") == []
    assert engine.cancelled == engine.ended == [7]


def test_an_echo_that_fails_leaves_nothing():
    async def echo(left):
        left.close()
        raise Refused("no scores", 500)

    with pytest.raises(Refused, match="no scores"):
        run(echo)


@pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
@pytest.mark.parametrize("ends", [False, True])
def test_what_no_scores_come_for_gets_an_error_in_json(ends):
    """The engine gives none, or the server ends first."""
    sent = []

    async def whole():
        engine = FakeLMDeploy()
        scores = Scores(sentence_piece(), logits=False)
        engine.engine.create_instance, engine.model_name = scores.create_instance, "x"
        engine.backend_config.max_batch_size, engine.generate = 4, None
        engine.tokenizer.model.model.all_special_ids = []
        engine.generate = GuardedGeneration(engine, lambda: None)
        scores.wait = asyncio.Event()
        validation = RequestValidation(None, engine, SimpleNamespace(api_keys=None, session_id=0))
        body = json.dumps({"model": "x", "prompt": "abcdabcd", "echo": True, "logprobs": 1}).encode()
        coming: asyncio.Queue = asyncio.Queue()
        coming.put_nowait({"type": "http.request", "body": body})

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        scope["headers"] = [(b"content-type", b"application/json")]
        task = asyncio.create_task(validation(scope, coming.get, send))
        while not (engine.generate._ends or task.done()):
            await asyncio.sleep(0.01)
        if ends:
            engine.generate.end_all("the server is shutting down")
        else:
            scores.wait.set()
        await asyncio.wait_for(task, 10)

    asyncio.run(whole())
    start, body = sent
    error = json.loads(body["body"])["error"]
    words = "the server is shutting down" if ends else "the engine gave no scores for the prompt; its log says why."
    assert (start["status"], error["message"], error["type"]) == (503 if ends else 500, words, "server_error")
