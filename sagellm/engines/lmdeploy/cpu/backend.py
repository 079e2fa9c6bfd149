"""Which implementation LMDeploy's layers get on the CPU device."""

from typing import Any

from lmdeploy.pytorch.backends.base import OpType
from lmdeploy.pytorch.backends.default import DefaultOpsBackend

from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.cpu.operators import builders
from sagellm.engines.lmdeploy.cpu.operators.attention import CpuAttentionMetadata


class CpuOpsBackend(DefaultOpsBackend):
    """LMDeploy's own torch implementations, and ours where it has none or a slow one."""

    @staticmethod
    def get_name() -> str:
        return "cpu"

    @classmethod
    def get_layer_impl_builder(cls, layer_type: OpType) -> Any:
        builder = builders().get(layer_type.name)
        return builder if builder is not None else super().get_layer_impl_builder(layer_type)

    @staticmethod
    def get_attention_metadata_cls() -> type:
        return CpuAttentionMetadata

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        step_context.attn_metadata = CpuAttentionMetadata.of_step(step_context)
        return step_context

    @staticmethod
    def init() -> None:
        """Called first in a worker process: the device must be known before anything asks for it."""
        from lmdeploy import sage_device

        sage_device.activate("cpu")

    @staticmethod
    def support_ray() -> bool:
        return True

    @staticmethod
    def ccl_backend() -> str:
        return "gloo"

    @staticmethod
    def build_graph_runner(model, model_config, cache_config, backend_config, device):
        return CpuRunner(model, model_config, cache_config, backend_config, device)
