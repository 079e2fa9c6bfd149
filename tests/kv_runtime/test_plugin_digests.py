"""`TieredKVWithDisk`: a file is never taken for that of other tokens, though keys collide."""

import itertools
import random

import numpy as np

from sagellm.kv_runtime.digests import token_digests
from tests.kv_runtime.disk_engine import FIRST, admit, push_out, settle
from tests.kv_runtime.test_plugin import tokens_of


def test_a_file_of_other_tokens_is_never_loaded(start):
    engine = start()
    push_out(engine)
    plugin = engine.plugin
    assert engine.admitted(9, FIRST, namespace="other adapter"), "the namespace is part of what a file is"
    other = tokens_of(0, 1, 3)
    admit(engine, 10, other)
    engine.serve(10, other)  # the engine compares the bytes that it is given
    assert plugin._counts["loads_failed"] == 0


def test_digests_chain_over_tokens_and_namespace():
    tokens = np.arange(12)
    digests = token_digests(tokens, "a", 4)
    assert len(digests) == len(set(digests)) == 3 and all(len(digest) == 16 for digest in digests)
    assert token_digests(tokens[4:], "a", 4, digests[0]) == digests[1:]
    assert token_digests(tokens[:11], "a", 4) == digests[:2]
    assert not set(digests) & set(token_digests(tokens, "b", 4))


def test_a_key_that_two_prefixes_share_names_one_of_them_only(start):
    engine = start(2, 2, disk_gib=2 * 8192 / 2**30, key_bits=8)
    plugin, books, requests = engine.plugin, engine.plugin._books, itertools.count(1)

    def key(tokens):
        return int(engine.keys(tokens, "")[0])

    def serve(tokens):
        request = next(requests)
        while not engine.admitted(request, [*tokens, 9]):
            settle(engine)
        assert engine.serve(request, [*tokens, 9])
        settle(engine)

    first = [0, 0, 0, 0]
    alike = next(t for t in ([a, b, 0, 0] for a in range(99) for b in range(1, 99)) if key(t) == key(first))
    others = {key([a, 7, 0, 0]): [a, 7, 0, 0] for a in range(99)}
    others.pop(key(first), None)
    others = itertools.cycle(others.values())
    serve(first)
    while key(first) not in plugin._link.store or books.fast_tier(key(first)):
        serve(next(others))
    serve(alike)
    assert plugin.report()["plugin"]["collisions"] == 1 and books.fast_tier(key(first)) is None
    while key(first) in plugin._link.store:  # until its file makes way
        serve(next(others))
        serve(alike)
    for _ in range(9):  # now files of the other one are written
        serve(alike)
        for _ in range(4):
            serve(next(others))
    assert plugin._digests.key_of(token_digests(np.array(alike), "", 4)[0]) == key(first)
    serve(first)


def test_two_prefixes_of_one_key_cannot_get_each_others_files_over_restarts(start):
    for seed in range(4):
        draw = random.Random(seed)
        for life in range(3):
            engine = start(8, 5, disk_gib=draw.choice([6, 12, 40]) * 8192 / 2**30, key_bits=draw.choice([3, 5, 8]))
            for number in range(30):
                request = 1000 * life + number
                blocks = [[draw.randrange(4), 0, 0, draw.randrange(2)] for _ in range(draw.randint(1, 4))]
                tokens = [*itertools.chain(*blocks), 9]
                admit(engine, request, tokens)
                engine.serve(request, tokens)
                if draw.random() < 0.5:
                    settle(engine)
            engine.plugin.close()


def test_a_file_that_was_replaced_behind_the_books_is_not_loaded(start):
    engine = start()
    push_out(engine)
    store = engine.plugin._link.store
    for key in list(store.keys()):
        stored = store.describe(key)
        store.remove(key)
        store.prepare(stored.block, b"another's digest")[:] = 0
        store.commit(key)
    computed = engine.num_computed
    admit(engine, 9, FIRST)
    assert engine.serve(9, FIRST)
    assert engine.num_computed == computed + len(FIRST) // 4
    engine.check()
