"""Judges one contestant of a benchmark against another: pass, regression, or cannot tell."""

from benchmarks.gate.base import Judgement, Rule, Verdict
from benchmarks.gate.judge import judge
from benchmarks.gate.rules import DEFAULT_RULES, load_rules
from benchmarks.gate.summary import markdown

__all__ = ["DEFAULT_RULES", "Judgement", "Rule", "Verdict", "judge", "load_rules", "markdown"]
