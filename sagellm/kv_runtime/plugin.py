"""The plug-ins that bring `kv_runtime` into an engine, by the names that configurations use."""

from sagellm.kv_runtime.tiered_kv import TieredKV
from sagellm.kv_runtime.tiered_kv_disk import TieredKVWithDisk

__all__ = ["TieredKV", "TieredKVWithDisk"]
