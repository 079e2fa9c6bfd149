"""Keys that sequences of a step have in common are read once: the same numbers as when each reads them."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagellm import _core
from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS8
from tests.engines.lmdeploy.cpu.plain_step import BLOCK, DTYPES, TOLERANCE, Model, Step, a_third_of, plain

SHAPE = dict(heads=6, kv_heads=3, head_size=64, num_blocks=400)
SPLIT = 256  # keys that a task reads
FEW_ROWS = 15  # of queries; more are multiplied


def shared(model: Model, form: str, common: int, lengths: list[tuple[int, int]], members: set[int]):
    """A step whose `members` have their first `common` tokens, and the blocks of these, in common."""
    step, decoder, caches, team = Step(model, lengths), model.native(), model.caches(form), _core.CpuTeam(2)
    first, *others = sorted(members)
    for other in others:
        step.texts[other][:common] = step.texts[first][:common]
        step.tables[other][: common // BLOCK] = step.tables[first][: common // BLOCK]
    if past := [row for row in range(len(lengths)) if lengths[row][1]]:
        step.run(model, decoder, caches, team, past, past_only=True, is_decoding=False)
    return step, lambda **more: step.run(model, decoder, caches, team, list(range(len(lengths))), **more)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Few rows, which read all heads of a token, and many, which are multiplied as those of prompts are. Members, and what is beyond
# the shared keys of each sequence, of which some are not members.
GROUPS = {
    "two": ({1, 3}, [40 - SPLIT, 30, 5 - SPLIT, 1]),
    "four": ({0, 1, 3, 4}, [3, 90, 0, 300, 2]),
    "nine": ({0, 1, 2, 3, 4, 5, 6, 8, 9}, list(range(1, 11))),
}


@a_third_of(dtype=DTYPES, form=["", LEVELS8, LEVELS4, FLOAT8], group=GROUPS)
def test_shared_keys_give_the_same_numbers(isa, dtype, form, group):
    members, beyond = GROUPS[group]
    model = Model(dtype=dtype, **SHAPE)
    step, run = shared(model, form, SPLIT, [(1, SPLIT + more) for more in beyond], members)
    apart, together = run(), run(shares=True)
    limit = 1e-5 if dtype is torch.float32 and not form else TOLERANCE[dtype]
    for row in range(len(beyond)):
        assert error(together[row], apart[row]) < limit
        if row not in members:
            assert torch.equal(together[row], apart[row])
        elif not form:
            assert error(together[row], plain(model, step.texts[row])[-1:]) < TOLERANCE[dtype]
    # Few rows are computed in the same order with shared keys and without. More rows differ in the last bits.
    if len(members) * model.heads // model.kv_heads <= FEW_ROWS:
        assert all(torch.equal(together[row], apart[row]) for row in members)
    elif dtype is torch.float32:
        assert any(not torch.equal(together[row], apart[row]) for row in members), "nothing was shared"


def test_two_groups_and_any_number_of_threads():
    """Sequences 0, 2 and 5 share two splits of keys, 1 and 4 one."""
    model = Model(dtype=torch.float32, **SHAPE)
    lengths = [(1, 520), (1, 300), (1, 600), (1, 20), (1, 290), (1, 515)]
    answers = []
    for threads in (1, 2, 3):
        torch.manual_seed(1)
        step, decoder, caches, team = Step(model, lengths), model.native(), model.caches(), _core.CpuTeam(threads)
        for first, others, common in ((0, (2, 5), 512), (1, (4,), 256)):
            for other in others:
                step.texts[other][:common] = step.texts[first][:common]
                step.tables[other][: common // BLOCK] = step.tables[first][: common // BLOCK]
        rows = list(range(len(lengths)))
        step.run(model, decoder, caches, team, rows, past_only=True, is_decoding=False)
        answers.append(step.run(model, decoder, caches, team, rows, shares=True))
    for row in rows:
        exact = plain(model, step.texts[row])[-1:]
        assert all(error(answer[row], exact) < TOLERANCE[torch.float32] for answer in answers)


def test_a_window_shares_nothing():
    model = Model(dtype=torch.float32, windows=(100, 0), **SHAPE)
    _, run = shared(model, "", SPLIT, [(1, SPLIT + 1), (1, SPLIT + 60)], {0, 1})
    assert all(torch.equal(one, other) for one, other in zip(run(), run(shares=True), strict=True))


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2)), min_size=1, max_size=9), st.integers(0, 24), st.integers(1, 4),
    st.integers(0, 999),
)  # fmt: skip
def test_any_tables(sequences, common_blocks, group_every, seed):
    """Any number of common blocks, of new tokens, and of sequences beside the group."""
    torch.manual_seed(seed)
    model = Model(dtype=torch.float32, **SHAPE)
    common = common_blocks * BLOCK
    members = {row for row in range(len(sequences)) if row % group_every == 0}
    lengths = [(new, common + past) for past, new in sequences]
    _, run = shared(model, "", common, lengths, members)
    for one, other in zip(run(shares=True), run(), strict=True):
        assert error(one, other) < 1e-5
