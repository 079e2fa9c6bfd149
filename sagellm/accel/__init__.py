"""Modules that make the engine faster, and their controller."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "AccelConfig": "controller",
    "AccelController": "controller",
    "BaseQuantizer": "quantization.base",
    "BranchInfo": "sot.results",
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
    "ParallelDecodeResult": "sot.results",
    "ParallelPrefillResult": "sot.results",
    "QuantizationProfile": "quantization.profile",
    "SchedulePlan": "sot.results",
    "ScheduleResult": "sot.results",
    "SkeletonDecodeResult": "sot.results",
    "SkeletonParseResult": "sot.results",
    "SkeletonPrefillResult": "sot.results",
    "SoTAnswer": "sot.results",
    "SpecSoT": "sot.pipeline",
    "SparsePolicy": "sparsity.base",
    "SpeculativeRun": "controller",
    "SpeculativeStrategy": "speculative.base",
    "SuffixStrategy": "speculative.suffix",
    "TaskData": "sot.results",
    "Verifier": "speculative.halves",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
