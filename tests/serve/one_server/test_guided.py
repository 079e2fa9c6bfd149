"""Guided decoding with formats that force an end, and one that does not."""

import json
import re

import pytest
from lmdeploy.serve.openai.protocol import ChatCompletionRequest

from sagellm.serve.formats import check_format
from tests.serve.endings import killed

ASK = [{"role": "user", "content": "Answer."}]
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
COLOUR = {"enum": ["red", "green", "blue"]}
OBJECT = {
    "type": "object",
    "properties": {"colour": COLOUR, "big": {"type": "boolean"}},
    "required": ["colour", "big"],
    "additionalProperties": False,
}


def ask(client, model, schema, **options):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = dict(max_tokens=64, temperature=0) | options
    return client.chat.completions.create(model=model, messages=ASK, response_format=wanted, **options).choices[0]


def plain_tokens(client, plain):
    """Tokens, since the text of a random model's half characters depends on how they were grouped into chunks."""
    content = client.chat.completions.create(**plain, logprobs=True).choices[0].logprobs.content
    return [entry.bytes for entry in content]


def check_guided(client, model):
    plain = dict(model=model, messages=ASK, max_tokens=8, temperature=0)
    before = plain_tokens(client, plain)
    for _ in range(2):
        choice = ask(client, model, COLOUR)
        assert choice.finish_reason == "stop" and json.loads(choice.message.content) in COLOUR["enum"]
        assert json.loads(ask(client, model, {"const": 17}).message.content) == 17
        sampled = ask(client, model, {"type": "boolean"}, temperature=1.0, seed=3)
        assert isinstance(json.loads(sampled.message.content), bool)
    word = {"type": "regex_schema", "regex_schema": r"[a-c]{3}-\d{2}"}
    choice = client.chat.completions.create(**plain | {"max_tokens": 32}, extra_body={"response_format": word}).choices[
        0
    ]
    assert choice.finish_reason == "stop" and re.fullmatch(word["regex_schema"], choice.message.content)
    for schema in (FLAGS, OBJECT):
        choice = ask(client, model, schema, max_tokens=128)
        # A small model may go on with white space, which JSON allows between any two of its parts.
        if choice.finish_reason == "stop":
            assert len(json.loads(choice.message.content)) == 2
        else:
            assert choice.message.content.lstrip()[:1] in "[{"
    assert plain_tokens(client, plain) == before


def test_in_float32(server, client):
    check_guided(client, server.model)
    server.wait_idle()


@pytest.mark.slow
def test_in_bfloat16_until_the_server_is_killed(launch):
    server = launch("--dtype", "bfloat16", model="llama-bf16").ready()
    with server.client() as client:
        check_guided(client, server.model)
    killed(server, 2)


def schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": fields}}


@pytest.mark.parametrize(
    "wanted",
    [
        # These end the process when they are compiled.
        {"type": "regex_schema", "regex_schema": "\0"},
        {"type": "regex_schema", "regex_schema": "\0a"},
        {"type": "regex_schema", "regex_schema": "(" * 30000 + "a" + ")" * 30000},
        {"type": "regex_schema", "regex_schema": r"([)]\))" * 65 + "(" * 30000 + "a" + ")" * 30000},
        schema(type="string", pattern="\0"),
        schema(type="string", pattern="(" * 30000 + "a" + ")" * 30000),
        schema(type="object", patternProperties={"\0": {}}),
        schema(type="object", patternProperties={"(" * 30000 + "a" + ")" * 30000: {}}),
        schema(type="object", propertyNames={"pattern": "\0"}),
        schema(type="object", properties={"a": {"enum": ["\0"]}}),
        # These compile to a grammar that allows anything.
        schema(**{"$ref": "#"}),
        schema(anyOf=[{"$ref": "#"}, {"type": "null"}]),
        schema(
            type="array",
            items={"$ref": "#/$defs/a"},
            **{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        ),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "["}}},
        {"type": "json_schema", "json_schema": {"name": "a", "json_schema": {"type": "boolean"}}},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema"},
        {"type": "regex_schema", "regex_schema": "(a"},
        {"type": "regex_schema", "regex_schema": ""},
        {"type": "regex_schema"},
        {"type": "grammar"},
    ],
)
def test_a_format_that_does_not_compile_is_refused(server, client, wanted):
    body = {"model": server.model, "messages": ASK, "max_tokens": 8, "response_format": wanted}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert ask(client, server.model, COLOUR).finish_reason == "stop"


def test_references_that_lead_into_a_part_are_no_cycle():
    leaf = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    node = {"anyOf": [{"type": "null"}, leaf, {"$ref": "#/$defs/flat"}]}
    tree = {"$ref": "#/$defs/node", "$defs": {"node": node, "flat": {"type": "string", "pattern": "[((]" * 100}}}
    check_format(ChatCompletionRequest(model="x", messages="x", response_format=schema(**tree)))


def test_deep_schemas_and_endless_answers_are_refused(server, client):
    deep = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    cases = [{"schema": deep}, {"schema": COLOUR, "ignore_eos": True}, {"schema": COLOUR, "min_new_tokens": 30}]
    for case in cases:
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": case.pop("schema")}}
        body = {"model": server.model, "messages": ASK, "max_tokens": 40, "response_format": wanted} | case
        assert server.post("/v1/chat/completions", body).status_code == 400
    assert ask(client, server.model, COLOUR).finish_reason == "stop"
