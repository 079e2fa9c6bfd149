"""Lines of the record that say what engine it was and what became of requests. `seq` is LMDeploy's `SchedulerSequence`."""

import time
from typing import Any

from sagellm.core.config import HookConfig
from sagellm.core.events import FORMAT
from sagellm.core.packages import version_of
from sagellm.core.scheduling import NO_SERVICE
from sagellm.engines.lmdeploy.prefix_cache import namespace_of
from sagellm.engines.lmdeploy.requests import parent_of, service_of


def open_line(scheduler: Any, config: HookConfig, prefix_caching: bool) -> dict[str, Any]:
    """Fields of `open`: what a replay needs to know of the engine."""
    cache = scheduler.cache_config
    return dict(
        format=FORMAT, version=version_of("sagellm") or "", engine="lmdeploy.pytorch", model=config.model, layout=config.layout,
        block_size=cache.block_size, block_bytes=config.block_bytes, num_blocks=cache.num_gpu_blocks,
        host_blocks=cache.num_cpu_blocks, prefix_caching=prefix_caching, max_prefill_tokens=cache.max_prefill_token_num,
        max_batch_size=scheduler.scheduler_config.max_batches, decode_round=scheduler.scheduler_config.prefill_interval,
        plugins=[spec.model_dump(mode="json") for spec in config.plugins],
        **({} if config.sparsity is None else {"sparsity": config.sparsity.model_dump(mode="json")}),
    )  # fmt: skip


def arrive_line(seq: Any) -> dict[str, Any]:
    """Fields of `arrive`."""
    service, asked = service_of(seq), {}
    if service is not NO_SERVICE:
        from_now = service._replace(deadline_s=service.deadline_s - time.perf_counter())
        asked = {
            name: value
            for name, value in from_now._asdict().items()
            if name != "tenant_id" and value != getattr(NO_SERVICE, name)
        }
    return dict(
        request=seq.session_id, tokens=seq.num_valid_ids, max_new=seq.sampling_param.max_new_tokens,
        namespace=namespace_of(seq), tenant=service.tenant_id, **({"service": asked} if asked else {}),
        **({} if (parent := parent_of(seq)) is None else {"parent": parent}),
    )  # fmt: skip


def end_line(request_id: int, seqs: list[Any]) -> dict[str, Any]:
    """Fields of `end`."""
    reason = end_reason(seqs[-1]) if seqs else "cancelled"
    return dict(request=request_id, generated=sum(seq.num_new_tokens for seq in seqs), reason=reason)


def end_reason(seq: Any) -> str:
    """stop, length, aborted or cancelled, as far as the request's tokens tell."""
    settings = seq.sampling_param
    if seq.status.name == "ABORTED":
        return "aborted"
    if seq.num_new_tokens and int(seq.generated_ids[-1]) in (settings.stop_words or ()):
        return "stop"
    return "length" if seq.num_new_tokens >= settings.max_new_tokens else "cancelled"
