"""The errors of sageLLM. Standard library only: the patch tool uses them before anything is installed."""


class SageError(Exception):
    """Base of every error that sageLLM raises on purpose.

    The message says what was got, what is allowed and what to do next; a caller may print it as it is.
    """


class ConfigError(SageError):
    """A configuration value, or a combination of values, that cannot work."""


class PatchError(SageError):
    """A tree that cannot be patched, or that is not in the state that was asked for."""


class PluginError(SageError):
    """A plug-in that cannot be loaded, that raised, overran its time limit or gave an answer that makes no sense."""


class CapacityError(SageError):
    """A request for more memory or more blocks than there is."""


class EngineError(SageError):
    """The engine refused a request or stopped."""


class SparsityError(SageError):
    """A sparse policy that is unknown, has invalid options, or cannot work with the engine."""


class PrefixIndexError(SageError, ValueError):
    """A prefix index was given something that it cannot use, or a snapshot that is not one."""


class LockError(PrefixIndexError):
    """A lock that is unknown or already released, or a removal of blocks that are locked."""


class BlockReuseError(PrefixIndexError):
    """A KV block id that holds another cached prefix."""


class PolicyError(SageError, ValueError):
    """A policy that is unknown, was given what it cannot use, or chose blocks that it may not have."""


class TierError(SageError):
    """A tier that cannot hold, read or write blocks: its memory, its folder or its files."""


class TraceError(SageError, ValueError):
    """A trace or a log that cannot be read; the message names the file and the line."""


class PlanError(SageError, ValueError):
    """A node, graph or plan that makes no sense, or a strategy that is unknown or breaks its contract."""


class SpeculationError(SageError, ValueError):
    """A speculative strategy that is unknown, cannot work with this model or engine, or breaks its contract."""


class CommError(SageError):
    """A communication backend that is unknown, cannot work here, was misused, or is broken."""


class CommTimeoutError(CommError, TimeoutError):
    """An operation that did not end before its deadline. The group it belongs to is broken from then on."""


class CommPeerError(CommError):
    """Another rank has gone, or has closed the group. The group is broken from then on."""


class TransferError(SageError):
    """KV blocks that were not moved: the message says why. The blocks they were to go to hold nothing of use."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer that did not end before its deadline."""


class TransferCancelled(TransferError):
    """A transfer that was cancelled."""


class PeerError(SageError):
    """An engine of the prefill/decode group that cannot be reached, has gone, does not know the key, or does not fit."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A peer that has not answered before the deadline."""


class QuantizationError(SageError, ValueError):
    """A model, method or size that cannot be quantized, or a quantized model that is damaged."""
