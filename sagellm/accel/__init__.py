"""Modules that make the engine faster, and their controller."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "AccelConfig": "controller",
    "AccelController": "controller",
    "BaseQuantizer": "quantization.base",
    "Calibration": "quantization.calibration",
    "ChainStrategy": "speculative.chain",
    "CoTAccelController": "cot.controller",
    "CoTStep": "cot.steps",
    "DraftModel": "speculative.halves",
    "DraftModelStrategy": "speculative.draft_model",
    "DraftTree": "speculative.tree",
    "DynamicLookaheadStrategy": "speculative.dynamic",
    "NgramStrategy": "speculative.ngram",
    "PairStrategy": "speculative.pair",
    "QuantizationProfile": "quantization.profile",
    "SpecSoT": "sot.pipeline",
    "SparsePolicy": "sparsity.base",
    "SpeculativeRun": "controller",
    "SpeculativeStrategy": "speculative.base",
    "SuffixStrategy": "speculative.suffix",
    "Verifier": "speculative.halves",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
