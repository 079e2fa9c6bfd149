"""Modules that make the engine faster without changing what it says."""

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.draft_model import DraftModelStrategy
from sagellm.accel.speculative.dynamic import DynamicLookaheadStrategy
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.accel.speculative.suffix import SuffixStrategy

__all__ = ["DraftModelStrategy", "DynamicLookaheadStrategy", "NgramStrategy", "SpeculativeStrategy", "SuffixStrategy"]
