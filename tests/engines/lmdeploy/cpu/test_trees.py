"""Trees of guesses in the native step: each token gets the numbers of a text that has its path alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm import _core
from sagellm.models.levels import LEVELS4
from tests.engines.lmdeploy.cpu.plain_step import (
    BLOCK,
    DTYPES,
    MODELS,
    TOLERANCE,
    Model,
    Step,
    a_third_of,
    plain,
)

KINDS = ["llama", "qwen3", "windows", "gemma2", "one key head", "odd sizes", "mixtral"]


def path_of(parents: list[int], node: int) -> list[int]:
    """Numbers from the first token to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class Trees:
    """A model with sequences whose new tokens are trees, behind `pasts` tokens."""

    def __init__(self, model: Model, pasts: list[int], parents: list[list[int]], form: str = "", threads: int = 2) -> None:
        self.model, self.pasts, self.parents = model, pasts, parents
        self.decoder, self.caches, self.team = model.native(), model.caches(form), _core.CpuTeam(threads)
        lengths = [(len(each), past) for each, past in zip(parents, pasts, strict=True)]
        self.step = Step(model, lengths)
        self.texts = [text.clone() for text in self.step.texts]
        self.rows = list(range(len(pasts)))
        self.step.run(model, self.decoder, self.caches, self.team, self.rows, past_only=True)
        flat = torch.tensor([parent for each in parents for parent in each])
        positions = torch.tensor([
            past + len(path_of(each, node)) - 1 for each, past in zip(parents, pasts, strict=True) for node in range(len(each))
        ])  # fmt: skip
        self.step.change = {"parents": flat.data_ptr(), "positions": positions.data_ptr()}
        self.found = self.step.run(model, self.decoder, self.caches, self.team, self.rows)
        self.step.change = {}

    def path_text(self, row: int, node: int) -> torch.Tensor:
        """The text up to the step, and the tokens of a node's path."""
        past = self.pasts[row]
        chosen = [past + number for number in path_of(self.parents[row], node)]
        return torch.cat([self.texts[row][:past], self.texts[row][chosen]])

    def alone(self, row: int, node: int) -> torch.Tensor:
        """The hidden state of a node, and the sequence as decoding token by token leaves it in other slots."""
        one = Step(self.model, [(1, self.pasts[row])])
        caches = self.model.caches()
        text = self.path_text(row, node)
        one.tables = torch.zeros(1, -(-len(text) // BLOCK), dtype=torch.int64) + torch.arange(-(-len(text) // BLOCK))
        one.texts, one.lengths = [text[: self.pasts[row] + 1]], [(1, self.pasts[row])]
        one.run(self.model, self.decoder, caches, self.team, [0], past_only=True)
        for past in range(self.pasts[row], len(text)):
            one.texts, one.lengths = [text[: past + 1]], [(1, past)]
            (hidden,) = one.run(self.model, self.decoder, caches, self.team, [0])
        return hidden[0]


def random_parents(num: int, width: int) -> list[int]:
    return [-1, *[int(torch.randint(max(0, node - width), node, ())) for node in range(1, num)]]


@a_third_of(dtype=DTYPES, kind=KINDS, past=[5, 247])
def test_a_token_of_a_tree_gets_the_numbers_of_its_path_decoded_alone(isa, dtype, kind, past):
    trees = Trees(Model(dtype=dtype, **MODELS[kind]), [past], [random_parents(17, 9)])
    for node in range(17):
        assert torch.equal(trees.alone(0, node), trees.found[0][node]), f"token {node}"


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_trees_are_those_of_plain_formulas(data):
    """Beside sequences that have no guesses, or chains."""
    kind, dtype = data.draw(st.sampled_from(KINDS[:-1])), data.draw(st.sampled_from(DTYPES))
    num = data.draw(st.integers(1, 3))
    pasts = data.draw(st.lists(st.one_of(st.integers(1, 40), st.integers(240, 270)), min_size=num, max_size=num))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=num, max_size=num))
    parents = [[-1, *[data.draw(st.integers(0, node - 1)) for node in range(1, size)]] for size in sizes]
    trees = Trees(Model(dtype=dtype, **MODELS[kind]), pasts, parents, threads=1)
    for row, each in enumerate(parents):
        for node in range(len(each)):
            exact = plain(trees.model, trees.path_text(row, node))[-1]
            error = (trees.found[row][node].double() - exact).norm() / exact.norm()
            assert error < 2 * TOLERANCE[dtype], f"sequence {row}, token {node} is off by {error:.2g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["", "float32"])
def test_keys_that_were_moved_are_those_of_the_path(dtype, form):
    """The next tokens get the same numbers as behind the path decoded token by token."""
    parents = [-1, 0, 0, 2, 0, 2, 5, 1, 6]
    past, path = 250, [0, 2, 5, 6, 8]  # across a block and a split of keys
    model = Model(dtype=dtype)
    trees = Trees(model, [past], [parents], form)
    table = trees.step.tables[0]

    def slot(place: int) -> int:
        return int(table[place // BLOCK]) * BLOCK + place % BLOCK

    trees.decoder.move([(slot(past + node), slot(past + place)) for place, node in enumerate(path) if node != place])
    text = torch.cat([trees.path_text(0, path[-1]), torch.randint(model.vocabulary, (1,))])
    step = trees.step
    step.texts, step.lengths = [text], [(1, len(text) - 1)]
    (behind,) = step.run(model, trees.decoder, trees.caches, trees.team, [0])
    fresh = model.caches(form)
    step.run(model, trees.decoder, fresh, trees.team, [0], past_only=True)
    step.texts, step.lengths = [trees.texts[0][:past]], [(1, past - 1)]
    for size in range(past, len(text)):
        step.texts, step.lengths = [text[: size + 1]], [(1, size)]
        (wanted,) = step.run(model, trees.decoder, fresh, trees.team, [0])
    assert torch.equal(behind, wanted)


def test_trees_that_cannot_be():
    model = Model()
    for parents in ([-1, 1], [0, 0], [-1, -1], [-1, 0, 3]):
        with pytest.raises(ValueError, match="a token of a tree comes after its parent"):
            step = Step(model, [(len(parents), 5)])
            flat = torch.tensor(parents)
            step.change = {"parents": flat.data_ptr()}
            step.run(model, model.native(), model.caches(), _core.CpuTeam(1), [0])
    model = Model(head_size=32)
    with pytest.raises(ValueError, match="trees of guesses need a decode step that reads all blocks, a plain cache"):
        step = Step(model, [(3, 5)])
        flat = torch.tensor([-1, 0, 0])
        step.change = {"parents": flat.data_ptr()}
        step.run(model, model.native(), model.caches(LEVELS4), _core.CpuTeam(1), [0])
    decoder = model.native()
    with pytest.raises(ValueError, match="a slot is outside of the cache"):
        step.change = {}
        step.run(model, decoder, model.caches(), _core.CpuTeam(1), [0])
        decoder.move([(0, 1 << 40)])
