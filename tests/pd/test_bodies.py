"""Tests of the parts of a client's request that go to a prefill engine."""

import json

from sagellm.pd.bodies import Body


def test_the_copy_for_a_prefill_engine():
    """Its one token may become the first of the answer, so what decides about it stays."""
    raw = {"prompt": "a", "seed": 3, "temperature": 0.5, "min_new_tokens": 5, "max_tokens": 9, "stream": True, "stop": ["x"]}
    copy = json.loads(Body(b"", raw).for_prefill("http://127.0.0.1:1", 7))
    assert copy.pop("migration_request")["remote_session_id"] == 7
    assert copy == {
        "prompt": "a", "seed": 3, "temperature": 0.5, "min_new_tokens": 1, "max_tokens": 1, "stream": False,
        "stop": ["x"], "with_cache": True, "preserve_cache": True,
    }  # fmt: skip
    assert "min_new_tokens" not in json.loads(Body(b"", {"prompt": "a"}).for_prefill("http://127.0.0.1:1", 7))


def test_a_minimum_of_tokens_is_for_the_engine_that_decodes():
    copy = json.loads(Body(b"", {"prompt": "a", "min_tokens": 9}).for_prefill("http://127.0.0.1:1", 7))
    assert copy["min_new_tokens"] == 1 and "min_tokens" not in copy


def test_several_answers_are_counted():
    for prompt, count in (("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2]], 2)):
        assert Body(b"", {"prompt": prompt}).num_prompts == count
    for raw, count in (({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"n": "x"}, 1)):
        assert Body(b"", raw).num_answers == count
