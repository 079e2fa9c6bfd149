"""Foundations of every other package: the hook contract, the plug-in guard, events, configuration, errors.

The names below are imported on first use, so that `sagellm.core.errors` stays usable where only the standard library is
installed.
"""

from sagellm.core.late_imports import late_imports

_HOME = {
    "ConfigError": "errors", "EngineError": "errors", "PluginError": "errors", "PolicyError": "errors", "SageError": "errors",
    "Plugin": "hooks", "PluginSpec": "config", "RequestMetadata": "scheduling", "SageConfig": "config", "SagePorts": "ports",
}  # fmt: skip

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
