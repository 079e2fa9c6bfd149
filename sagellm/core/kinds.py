"""The kinds of plug-ins: one table. A new kind is one row of `KINDS`; `sagellm list` and `sagellm check` work for it then.

The names in a row are imported on request, so the table loads nothing and depends on no other package.
"""

from importlib import import_module
from typing import Any, NamedTuple

from sagellm.core.options import find_row

__all__ = ["KINDS", "Kind", "find_kind"]


class Kind(NamedTuple):
    """One kind of plug-in. Classes and objects are named as `module:name`.

    Attributes:
        name: the kind, on the command line.
        what: the kind, in sentences.
        base: the class to extend.
        registry: the `Registry` that finds classes of this kind.
        suite: the contract `Suite` that checks them.
        example: a class to start from.
        docs: the page that explains the kind.
        key: the field that holds the name in JSON documents, for scripts that read those of the older commands.
        old_list, old_check: older spellings of `list` and `check`: group and command.
    """

    name: str
    what: str
    base: str
    registry: str
    suite: str
    example: str
    docs: str
    key: str
    old_list: tuple[str, str] | None = None
    old_check: tuple[str, str] | None = None

    def load(self, field: str) -> Any:
        """Import what a field names: `base`, `registry`, `suite` or `example`."""
        module, _, name = getattr(self, field).partition(":")
        return getattr(import_module(module), name)


KINDS = (
    Kind(
        name="plugin", what="engine plug-in", key="plugin", docs="sagellm/core/README.md",
        base="sagellm.core.hooks:Plugin",
        registry="sagellm.core.registry:PLUGINS",
        suite="sagellm.engines.lmdeploy.contract.plugin:SUITE",
        example="sagellm.scheduler_ir.strategy_plugin:StrategyPlugin",
    ),
    Kind(
        name="policy", what="eviction policy", key="policy", docs="sagellm/kv_policy/README.md",
        base="sagellm.kv_policy.base:EvictionPolicy",
        registry="sagellm.kv_policy.registry:POLICIES",
        suite="sagellm.kv_policy.contract.rules:SUITE",
        example="sagellm.kv_policy.eviction.lru:Lru",
        old_list=("policy", "list"), old_check=("policy", "check"),
    ),
    Kind(
        name="migration", what="migration policy", key="migration", docs="sagellm/kv_policy/README.md",
        base="sagellm.kv_policy.base:MigrationPolicy",
        registry="sagellm.kv_policy.registry:MIGRATIONS",
        suite="sagellm.kv_policy.contract.migration:SUITE",
        example="sagellm.kv_policy.migration.always:Always",
    ),
    Kind(
        name="lifetime", what="lifetime predictor", key="lifetime", docs="sagellm/kv_policy/README.md",
        base="sagellm.kv_policy.base:LifetimePredictor",
        registry="sagellm.kv_policy.registry:LIFETIMES",
        suite="sagellm.kv_policy.contract.lifetime:SUITE",
        example="sagellm.kv_policy.lifetime.exponential:ExponentialLifetime",
    ),
    Kind(
        name="routing", what="routing policy of a prefill/decode group", key="routing", docs="sagellm/pd/README.md",
        base="sagellm.pd.base:RoutingPolicy",
        registry="sagellm.pd.routing:POLICIES",
        suite="sagellm.pd.contract:SUITE",
        example="sagellm.pd.routing:PDPolicy",
    ),
    Kind(
        name="engine-kind", what="engine kind of the control plane", key="kind", docs="sagellm/control_plane/README.md",
        base="sagellm.control_plane.base:EngineKind",
        registry="sagellm.control_plane.registry:ENGINE_KINDS",
        suite="sagellm.control_plane.contract:ENGINE_SUITE",
        example="sagellm.control_plane.kinds.vllm:VLLM",
    ),
    Kind(
        name="router", what="router of the control plane", key="router", docs="sagellm/control_plane/README.md",
        base="sagellm.control_plane.base:Router",
        registry="sagellm.control_plane.registry:ROUTERS",
        suite="sagellm.control_plane.contract:ROUTER_SUITE",
        example="sagellm.control_plane.routers.least_load:LeastLoad",
    ),
    Kind(
        name="scaling", what="scaling policy of the control plane", key="policy", docs="sagellm/control_plane/README.md",
        base="sagellm.control_plane.base:ScalingPolicy",
        registry="sagellm.control_plane.registry:SCALERS",
        suite="sagellm.control_plane.contract:SCALING_SUITE",
        example="sagellm.control_plane.scalers.sla:SLA",
    ),
    Kind(
        name="strategy", what="scheduling strategy", key="strategy", docs="sagellm/scheduler_ir/README.md",
        base="sagellm.scheduler_ir.strategies.base:SchedulingStrategy",
        registry="sagellm.scheduler_ir.strategies.registry:STRATEGIES",
        suite="sagellm.scheduler_ir.contract.rules:SUITE",
        example="sagellm.scheduler_ir.strategies.fifo:Fifo",
        old_list=("strategy", "list"), old_check=("strategy", "check"),
    ),
    Kind(
        name="speculative", what="speculative strategy", key="strategy", docs="sagellm/accel/README.md",
        base="sagellm.accel.speculative.base:SpeculativeStrategy",
        registry="sagellm.accel.speculative.registry:SPECULATORS",
        suite="sagellm.engines.lmdeploy.contract.speculative:SUITE",
        example="sagellm.accel.speculative.ngram:NgramStrategy",
        old_list=("speculative", "list"), old_check=("speculative", "check"),
    ),
    Kind(
        name="sparsity", what="sparse policy", key="policy", docs="sagellm/accel/sparsity/README.md",
        base="sagellm.accel.sparsity.base:SparsePolicy",
        registry="sagellm.accel.sparsity.registry:SPARSITIES",
        suite="sagellm.accel.sparsity.contract:SUITE",
        example="sagellm.accel.sparsity.policies.streaming:Streaming",
    ),
    Kind(
        name="quantizer", what="quantization method", key="quantizer", docs="sagellm/accel/quantization/README.md",
        base="sagellm.accel.quantization.base:BaseQuantizer",
        registry="sagellm.accel.quantization.registry:QUANTIZERS",
        suite="sagellm.accel.quantization.contract:SUITE",
        example="sagellm.accel.quantization.methods.int8:Int8",
    ),
    Kind(
        name="backend", what="collective backend", key="backend", docs="sagellm/comm_backend/README.md",
        base="sagellm.comm_backend.base:CommBackendProtocol",
        registry="sagellm.comm_backend.registry:BACKENDS",
        suite="sagellm.comm_backend.contract.rules:SUITE",
        example="sagellm.comm_backend.memory:MemoryBackend",
        old_list=("comm", "list"), old_check=("comm", "check"),
    ),
    Kind(
        name="channel", what="KV transfer channel", key="channel", docs="sagellm/comm_backend/kv_transfer/README.md",
        base="sagellm.comm_backend.kv_transfer.base:KVTransferChannel",
        registry="sagellm.comm_backend.kv_transfer.registry:CHANNELS",
        suite="sagellm.comm_backend.kv_transfer.contract.rules:SUITE",
        example="sagellm.comm_backend.kv_transfer.tcp:TcpChannel",
        old_list=("comm", "channels"), old_check=("comm", "check-channel"),
    ),
    Kind(
        name="device", what="device of the PyTorch engine", key="device", docs="sagellm/engines/README.md",
        base="sagellm.engines.lmdeploy.contract.device:Device",
        registry="sagellm.engines.lmdeploy.contract.device:DEVICES",
        suite="sagellm.engines.lmdeploy.contract.device:SUITE",
        example="sagellm.engines.lmdeploy.cpu.device:CpuDevice",
    ),
)  # fmt: skip


def find_kind(name: str) -> Kind:
    """Return the kind of that name. Raises ConfigError if the name is unknown."""
    return find_row(KINDS, name, "kind of plug-in")
