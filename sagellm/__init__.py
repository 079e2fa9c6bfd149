"""sageLLM: a laboratory for LLM inference on LMDeploy 0.11.0."""

__version__ = "0.1.0"
