"""Whether LMDeploy's PyTorch engine has a model's architecture, and the CPU device its operators."""

from pathlib import Path
from typing import Any, NamedTuple

from sagellm.models import ModelError
from sagellm.models.folder import read_hf_config

__all__ = ["CpuSupport", "check_architecture", "check_harmony", "cpu_support", "sees"]


class CpuSupport(NamedTuple):
    """Support of the CPU device for a model.

    Attributes:
        missing: reasons by operator of LMDeploy that the device lacks; empty if it can run the model.
        eager: why a step runs module by module; empty if it is one native call.
    """

    missing: dict[str, str]
    eager: str


# The CPU device has all operators of these; others are tried, which takes a second.
COMPLETE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


def check_architecture(model: Path, device: str, dtype: str) -> None:
    """Check what would end the engine process.

    Args:
        dtype: type of the weights.

    Raises:
        ModelError: LMDeploy's PyTorch engine does not have the architecture, or the CPU device lacks one of its operators.
    """
    config = read_hf_config(model)
    names = config.get("architectures") or []
    if COMPLETE.issuperset(names) and not config.get("quantization_config"):
        return
    from lmdeploy.pytorch.models.module_map import MODULE_MAP

    own_code = {str(each).rpartition(".")[2] for each in config.get("auto_map", {}).values()}
    if not {*names, *own_code} & set(MODULE_MAP):
        raise ModelError(
            f"{model} has architecture {', '.join(names)}, which LMDeploy 0.11.0's PyTorch engine does not have."
        )
    missing = cpu_support(model, dtype).missing if device == "cpu" else {}
    if missing:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ModelError(f"{model} has architecture {', '.join(names)}, which the CPU device cannot run: {reasons}")


def check_harmony(model: Path) -> None:
    """Check that a server can parse the answers of gpt-oss, for which it loads the vocabulary of Harmony. Others pass.

    Raises:
        ModelError: it is neither in the cache nor to be downloaded.
    """
    if "GptOssForCausalLM" not in (read_hf_config(model).get("architectures") or []):
        return
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    try:
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:
        raise ModelError(
            f"{model} needs the vocabulary of Harmony, its chat format: {str(error).rstrip('.')}. Download o200k_base.tiktoken "
            "where there is a network, and set TIKTOKEN_ENCODINGS_BASE to its folder."
        ) from None


def sees(model: Path) -> bool:
    """Return whether LMDeploy serves a model as one that takes images. Here it gets none."""
    from lmdeploy.archs import check_vl_llm

    return check_vl_llm(read_hf_config(model))


def cpu_support(model: Path, dtype: str) -> CpuSupport:
    """Build the model's layers without weights, and collect what the CPU device cannot build.

    Args:
        dtype: type of the weights.
    """
    import torch
    from lmdeploy.pytorch.config import ModelConfig
    from lmdeploy.pytorch.models.patch import BuildModelContext, build_patched_model

    from sagellm.engines.lmdeploy.cpu.backend import CpuOpsBackend
    from sagellm.engines.lmdeploy.cpu.compiled import why_eager
    from sagellm.engines.lmdeploy.cpu.device import CPU_DEVICE

    eager, found = "it cannot run", {}
    original = CpuOpsBackend.__dict__["get_layer_impl_builder"]

    def builder(backend: type[CpuOpsBackend], operator: Any) -> Any:
        try:
            return _Recorder(original.__func__(backend, operator), operator.name, found)
        except Exception as error:
            found[operator.name] = str(error)
            return _Stub()

    CpuOpsBackend.init()
    CpuOpsBackend.get_layer_impl_builder = classmethod(builder)
    try:
        config = ModelConfig.from_pretrained(str(model), dtype=dtype)
        CPU_DEVICE.quantization(config.hf_config)
        built = build_patched_model(config, torch.device("meta"), build_model_ctx=BuildModelContext())
        if not found:
            eager = why_eager(built)
    except Exception as error:
        found.setdefault("model", str(error) or type(error).__name__)
    finally:
        CpuOpsBackend.get_layer_impl_builder = original
    return CpuSupport(found, eager)


class _Recorder:
    """A builder of LMDeploy that notes its refusals instead of raising them."""

    def __init__(self, builder: Any, name: str, found: dict[str, str]) -> None:
        self._builder, self._name, self._found = builder, name, found

    def build(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._builder.build(*arguments, **named)
        except Exception as error:
            self._found[self._name] = str(error)
            return _Stub()


class _Stub:
    """Takes the place of an operator that cannot be built, so that the others are still tried."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self
