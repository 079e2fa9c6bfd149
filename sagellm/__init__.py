"""sageLLM: a laboratory for LLM inference on LMDeploy 0.11.0. The names below are imported on first use."""

from sagellm.core.late_imports import late_imports

__version__ = "0.1.0"

_HOME = {
    "AccelConfig": "accel.controller",
    "AccelController": "accel.controller",
    "ControlPlaneManager": "control_plane.manager",
    "DraftModelStrategy": "accel.speculative.draft_model",
    "DynamicLookaheadStrategy": "accel.speculative.dynamic",
    "EvictionPolicy": "kv_policy.base",
    "KINDS": "core.kinds",
    "KVTransferChannel": "comm_backend.kv_transfer.base",
    "CommBackendProtocol": "comm_backend.base",
    "LMDeployEngine": "engines.lmdeploy.engine",
    "MigrationPolicy": "kv_policy.base",
    "NgramStrategy": "accel.speculative.ngram",
    "Plugin": "core.hooks",
    "PluginSpec": "core.config",
    "SageConfig": "core.config",
    "SageError": "core.errors",
    "SamplingParams": "engines.base",
    "SchedulingStrategy": "scheduler_ir.strategies.base",
    "SpeculativeStrategy": "accel.speculative.base",
    "SuffixStrategy": "accel.speculative.suffix",
    "UnifiedInferenceClient": "control_plane.client",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
