"""Strategies that do with a model of their own what makes no sense, each in one way."""

from pathlib import Path

import numpy as np

from sagellm.accel.speculative.draft_model import DraftModelStrategy

MODEL = "no folder is needed"


class Draft(DraftModelStrategy):
    def __init__(self, model=MODEL, **options):
        super().__init__(model, **options)


class KeepsRejected(Draft):
    """Takes the keys of all its guesses for those of the text."""

    def propose(self, asks):
        answers = super().propose(asks)
        for state in self._known.values():
            state.valid = state.size + len(state.guesses)
        return answers


class KeepsLost(Draft):
    """Does not hear that a request lost its blocks."""

    def begin(self, request_id, tokens):
        pass


class BlocksOfAnother(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(blocks=asks[0].blocks.repeat(9)) for ask in asks])


class ForeignBlocks(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(blocks=ask.blocks + 10**6) for ask in asks])


class NegativeBlocks(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(blocks=-1 - ask.blocks) for ask in asks])


class ForeignTokens(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(tokens=ask.tokens - 10**6) for ask in asks])


class TooFewBlocks(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(blocks=ask.blocks[:1]) for ask in asks])


class OtherTokens(Draft):
    def propose(self, asks):
        return super().propose([ask._replace(tokens=ask.tokens[::-1]) for ask in asks])


class SkipsOne(Draft):
    """Computes what is new behind a place that it never computed."""

    def _guess(self, asks, known, places, rows, num_before):
        super()._guess(asks, known, places, rows, [before + 1 for before in num_before])


class MixesBranches(Draft):
    """Computes another first guess, and goes on behind the second one, which followed the first one before."""

    def propose(self, asks):
        answers = super().propose(asks)
        for ask, answer in zip(asks, answers, strict=True):
            size = len(ask.tokens)
            for token, place in ((answer[0] + 1, size), (answer[2], size + 2)) if len(answer) > 2 else ():
                self._runner.forward([np.array([token])], [place], [ask.blocks])
        return answers


class LoadsAnother(Draft):
    def bind(self, target):
        super().bind(target)
        target.load(Path("another"))


class LoadsNone(Draft):
    def bind(self, target):
        self._block_size = target.block_size

    def propose(self, asks):
        return [[] for _ in asks]


class NoFolders(Draft):
    def bind(self, target):
        super().bind(target)
        self.models = None


# Words of the message with which the rule `models` reports each class.
BAD = {
    KeepsRejected: "is believed to hold the key of token", KeepsLost: "compute anew what was not accepted",
    BlocksOfAnother: "no text's that was asked about", ForeignBlocks: "blocks from", NegativeBlocks: "blocks from -",
    ForeignTokens: "token ids from", TooFewBlocks: "do not fit", OtherTokens: "is computed token", SkipsOne: "believed to hold",
    MixesBranches: "behind another text",
    LoadsAnother: "bind loads another, which `models` lacks", LoadsNone: "which bind does not load",
    NoFolders: "no row of folders",
}  # fmt: skip
