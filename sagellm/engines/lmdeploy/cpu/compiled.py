"""A whole step of a model in one native call.

`describe` reads LMDeploy's own modules. A model that it does not know, or a step that carries embeddings, runs the modules
eagerly, over the same packed weights.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from torch import nn

from sagellm import _core
from sagellm.accel.speculative.tree import Draft, depths_of, parents_of
from sagellm.core.config import HookConfig
from sagellm.engines.lmdeploy.cpu.cache import describe as describe_cache
from sagellm.engines.lmdeploy.cpu.operators import prepare
from sagellm.engines.lmdeploy.cpu.operators.activation import kind_of
from sagellm.engines.lmdeploy.cpu.operators.attention import CpuAttentionImpl
from sagellm.engines.lmdeploy.cpu.operators.linear import CpuLinearImpl
from sagellm.engines.lmdeploy.cpu.operators.moe import CpuFusedMoEImpl
from sagellm.engines.lmdeploy.cpu.operators.rotary import TabledRotaryEmbedding
from sagellm.engines.lmdeploy.cpu.operators.sampling import Sampled, follow, wishes_of
from sagellm.engines.lmdeploy.cpu.packed import (
    PackedEmbedding,
    PackedGate,
    PackedWeight,
    computing_in,
    kernels,
    team,
)
from sagellm.engines.lmdeploy.cpu.ranks import Exchanges, LayerExchange, Ranks, ranks_of
from sagellm.engines.lmdeploy.cpu.ready_step import ReadyStep
from sagellm.engines.lmdeploy.cpu.runtime import use_huge_pages
from sagellm.engines.lmdeploy.sparsity import steps_of
from sagellm.models.gguf_levels import GGUFLevels

__all__ = ["CpuRunner", "describe", "why_eager"]

# Classes of LMDeploy whose modules have the names that `describe` reads. Gemma 2 has Gemma's.
ARCHITECTURES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM",
    "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip


@dataclass
class Description:
    """A model for the native code. `kept` holds what its addresses point to."""

    decoder: Any
    rotary: TabledRotaryEmbedding
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    dtype: torch.dtype
    head: PackedWeight  # of this worker
    logits: int  # outputs of the whole output layer
    ranks: Ranks
    replicas: int  # adjacent workers that have the same key head
    kept: list[Any] = field(default_factory=list)


def why_eager(model: nn.Module) -> str:
    """Return why a model of LMDeploy runs module by module; empty if it runs natively. Its weights need not be loaded."""
    if (name := type(model).__name__) not in ARCHITECTURES:
        return f"the native step does not know {name}"
    inner = model.model
    if getattr(inner, "model_type", "") == "gemma3_text":
        return "its layers have two rotary embeddings"
    if getattr(inner, "aux_hidden_state_layers", ()):
        return "it gives hidden states of inner layers to a draft model"
    if not isinstance(inner.rotary_emb, TabledRotaryEmbedding):
        return "its rotary embedding depends on the length of the text"
    if getattr(model, "enable_return_routed_experts", False):
        return "it gives the experts of each token to the caller"
    linears = [model.lm_head]
    for block in inner.layers:
        attention, (feed, mixture) = block.self_attn, _parts(block)
        if mixture is not None:
            if not isinstance(mixture.experts.impl, CpuFusedMoEImpl) or mixture.experts.act_func is not None:
                return "its experts are quantized, or not gated by SiLU"
            if mixture.softmax_topk.impl.n_groups > 0:
                return "its router chooses among groups of experts"
            linears += [mixture.gate] if feed is None else [mixture.gate, mixture.shared_expert_gate]
        if feed is not None:
            if not isinstance(feed.gate_up_proj, PackedGate) and not kind_of(feed.act_fn):
                return "its feed-forward layers are not gated by SiLU or GELU"
            linears += [feed.gate_up_proj, feed.down_proj]
        if not isinstance(attention.attn_fwd.impl, CpuAttentionImpl):
            return "its attention is not the CPU device's"
        linears += [attention.qkv_proj, attention.o_proj]
    for linear in linears:
        if isinstance(linear, PackedGate):
            continue
        if not isinstance(getattr(linear, "impl", None), CpuLinearImpl):
            return "its weights are quantized"
        if len(linear.lora_adapters):
            return "a layer has adapters"
    return ranks_of(model)[1]


def _parts(block: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the feed-forward part of a layer, the shared expert of a mixture, and the mixture; None for what it lacks."""
    part = block.block_sparse_moe if hasattr(block, "block_sparse_moe") else block.mlp
    return (getattr(part, "shared_expert", None), part) if hasattr(part, "experts") else (part, None)


def describe(model: nn.Module) -> Description:
    """Describe a model that `why_eager` has no reason against, and whose weights are packed."""
    inner, kept, (ranks, _) = model.model, [], ranks_of(model)
    first, whole_head = inner.layers[0].self_attn.attn_fwd.impl, model.lm_head.impl.packed
    head, dtype = ranks.head(whole_head), whole_head.dtype
    replicas = getattr(inner.layers[0].self_attn.qkv_proj, "num_replicate_kv_heads", 1)

    def numbers(norm: nn.Module | None) -> int:
        if norm is None:
            return 0
        kept.append(norm.weight.detach().float().contiguous())
        return kept[-1].data_ptr()

    def mixture_of(mixture: nn.Module) -> dict[str, Any]:
        gates = [mixture.gate, mixture.shared_expert_gate] if hasattr(mixture, "shared_expert_gate") else [mixture.gate]
        rows = [gate.impl.packed.rows(torch.arange(gate.impl.packed.outputs)) for gate in gates]
        router = PackedWeight(torch.cat(rows))
        experts = mixture.experts.impl
        kept.extend([router, experts])
        return {
            "router": router.matrix,
            "gate_up": [gate_up.packed.matrix for gate_up, _ in experts.packed],
            "down": [down.matrix for _, down in experts.packed],
            "top_k": mixture.top_k,
            "renormalize": experts.renormalize,
        }

    def layer(block: nn.Module) -> dict[str, Any]:
        attention, (feed, mixture) = block.self_attn, _parts(block)
        # Gemma 2 norms the output of each part, and its names for the norms before them differ.
        is_normed = hasattr(block, "pre_feedforward_layernorm")
        before_feed = block.pre_feedforward_layernorm if is_normed else block.post_attention_layernorm
        kept.extend([attention.qkv_proj, attention.o_proj, feed])
        return {
            "qkv": attention.qkv_proj.impl.packed.matrix,
            "out": attention.o_proj.impl.packed.matrix,
            "gate_up": None if feed is None else feed.gate_up_proj.packed.matrix,
            "down": None if feed is None else feed.down_proj.impl.packed.matrix,
            "experts": None if mixture is None else mixture_of(mixture),
            "attention_norm": numbers(block.input_layernorm),
            "feed_forward_norm": numbers(before_feed),
            "after_attention": numbers(block.post_attention_layernorm if is_normed else None),
            "after_feed_forward": numbers(block.post_feedforward_layernorm if is_normed else None),
            "query_norm": numbers(getattr(attention, "q_norm", None)),
            "key_norm": numbers(getattr(attention, "k_norm", None)),
            "window": attention.attn_fwd.impl.window or 0,
        }

    feed, mixture = _parts(inner.layers[0])
    gated = mixture.experts.impl.packed[0][0] if feed is None else feed.gate_up_proj
    if not isinstance(inner.embed_tokens, PackedEmbedding):  # its output layer has weights of its own
        inner.embed_tokens = PackedEmbedding(PackedWeight(inner.embed_tokens.weight.detach()))
    embedding = inner.embed_tokens.packed
    shape = {
        "hidden": head.inputs,
        "heads": first.num_heads,
        "kv_heads": first.num_kv_heads,
        "head_size": first.head_size,
        "vocabulary": embedding.outputs,
        "epsilon": inner.norm.impl.epsilon,
        "attention_scale": first.scale,
        "softcap": first.softcap,
        "logit_softcap": getattr(model, "final_logit_softcapping", None) or 0.0,
        "embedding_scale": head.inputs**0.5 if type(model).__name__ == "GemmaForCausalLM" else 1.0,
        "activation": gated.activation,
    }
    if ranks.size > 1:
        shape |= {"ranks": ranks.size, "rank": ranks.rank, "replicas": replicas, "logits": whole_head.outputs}
    layers = [layer(block) for block in inner.layers]
    kept.append(embedding)
    decoder = _core.CpuDecoder(kernels(dtype), shape, layers, embedding.matrix, numbers(inner.norm), head.matrix)
    sizes = (head.inputs, first.num_heads, first.num_kv_heads, first.head_size, len(layers))
    return Description(decoder, inner.rotary_emb, *sizes, dtype, head, whole_head.outputs, ranks, replicas, kept)


class CpuRunner(GraphRunner):
    """Runs a step natively where it can, else module by module."""

    def __init__(self, model: nn.Module, model_config: Any, cache_config: Any, *args, **kwargs) -> None:
        spec = getattr(cache_config, "sage", None)
        hooks = HookConfig.model_validate_json(spec) if spec else HookConfig()
        with computing_in(hooks.compute):
            prepare(model, None if hooks.packed_weights is None else GGUFLevels(hooks.packed_weights))
            super().__init__(model, model_config, cache_config, *args, **kwargs)
            self.reason = why_eager(model)
            self.native: Description | None = None if self.reason else describe(model)
        self._exchanges: Exchanges | None = None
        if self.native is not None and self.native.ranks.size > 1:
            has_halves = any(_parts(block)[1] is None for block in model.model.layers)
            self._exchanges = Exchanges(
                self.native.ranks, self.native.layers, self.native.hidden, self.native.logits, has_halves
            )
        self._sharing = "where it pays" if hooks.prefix_attention == "auto" else "never"  # keys of common prefixes
        self._bound: Any = None
        self._trees: Sequence[Any] | None = None  # guesses of the sequences of the next step
        self._bounds: torch.Tensor | None = None
        self._codes: torch.Tensor | None = None
        self._key_sums: torch.Tensor | None = None
        self._sparse = None if hooks.sparsity is None else steps_of(cache_config)
        if self._sparse is not None and self.native is not None:
            native = self.native
            self._sparse.bind(native.heads, native.kv_heads, native.head_size, native.decoder.prompt_tile)
            if self._exchanges is not None:
                self._sparse.split(native.ranks.size, native.replicas, self._agree)
        if self._sparse is not None and (ranks := ranks_of(model)[0]).size > 1:
            self._sparse.serve_engine(is_first=ranks.rank == 0, is_recorded=hooks.record is not None)

    def get_capture_batch_sizes(self) -> list[int]:
        """There is no graph to capture, hence one warm-up batch instead of one a power of two."""
        return [1]

    def __call__(self, input_ids=None, position_ids=None, past_key_values=None, attn_metadata=None, inputs_embeds=None, **more):
        if self.native is None or inputs_embeds is not None:
            return self.model(
                input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, attn_metadata=attn_metadata,
                inputs_embeds=inputs_embeds, **more,
            )  # fmt: skip
        queries, parents = attn_metadata.q_seqlens, None
        if self._trees is not None:
            position_ids, parents = self._tree_rows(attn_metadata.kv_seqlens - queries, queries)
        hidden = torch.empty(1, input_ids.numel(), self.native.hidden, dtype=self.native.dtype)
        rows = (input_ids, position_ids, queries, attn_metadata.kv_seqlens, attn_metadata.block_offsets)
        num_positions = int(position_ids.max()) + 1
        self.run(self._prepare(past_key_values, attn_metadata.is_decoding, rows, num_positions, hidden, parents=parents))
        return hidden

    def _tree_rows(self, before: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position and parent of each row of the planted guesses, int64 [rows].

        Args:
            before, queries: tokens of each sequence before the step, and in it.
        """
        trees, self._trees = self._trees, None
        parents = torch.tensor([row for draft in trees for row in (-1, *[parent + 1 for parent in parents_of(draft)])])
        places = torch.tensor([row for draft in trees for row in (0, *[depth + 1 for depth in depths_of(draft)])])
        return torch.repeat_interleave(before, queries) + places, parents

    def takes_trees(self, caches: Any) -> bool:
        """Whether a decode step over these caches may have trees of guesses."""
        if self.native is None or self._sparse is not None or self._exchanges is not None:
            return False
        if self._bound is not caches:
            self._bind(caches)
        return self.native.decoder.takes_trees

    def plant(self, drafts: Sequence[Draft] | None) -> None:
        """Take the guesses of the next step, of each of its sequences. None: there are no trees among them."""
        self._trees = drafts

    def move(self, slots: list[tuple[int, int]]) -> None:
        """Copy keys and values from slot to slot, as `CpuDecoder.move`."""
        self.native.decoder.move(slots)

    def prepare(self, caches: Any, inputs: Any, sampling: SamplingInputs) -> ReadyStep:
        """Make a decode step ready that draws the token after each row.

        Args:
            inputs: LMDeploy's `ModelInputs`; a sequence has a row for its last token, and one for each guess.
            sampling: of each row, without response formats and logits processors.
        """
        before, queries, parents = inputs.history_lengths, inputs.seq_length, None
        rows = inputs.input_ids.numel()
        wishes = wishes_of(sampling, rows, self.native.logits)
        if self._trees is not None:
            positions, parents = self._tree_rows(before, queries)
        elif rows > len(queries):
            first = torch.repeat_interleave(before - (queries.cumsum(0) - queries), queries)
            positions = first + torch.arange(rows)
        else:
            positions = before
        lengths = before + queries - inputs.num_ignored_history
        rows_of = (inputs.input_ids, positions, queries, lengths, inputs.block_offsets)
        return self._prepare(caches, True, rows_of, inputs.max_kv_seqlen, None, wishes, parents)

    def _prepare(
        self, caches: Any, is_decoding: bool, rows: Sequence[torch.Tensor], num_positions: int, hidden: torch.Tensor | None,
        wishes: dict[str, Any] | None = None, parents: torch.Tensor | None = None,
    ) -> ReadyStep:  # fmt: skip
        """`rows`: tokens, positions, query lengths, lengths and tables, as `DecoderStep` has them."""
        if self._bound is not caches:
            self._bind(caches)
        # In float32 whatever the model's dtype is: the angles are exact.
        angles = self.native.rotary.table(num_positions, torch.float32)
        whole = [each if each.dtype is torch.int64 and each.is_contiguous() else _whole(each) for each in rows]
        names = ("tokens", "positions", "query_lengths", "lengths", "tables")
        tensors = {name: each.data_ptr() for name, each in zip(names, whole, strict=True)}
        tokens, _, queries, _, tables = whole
        tensors |= {
            "is_decoding": is_decoding, "num_tokens": tokens.numel(), "num_sequences": queries.numel(),
            "table_width": tables.shape[1], "angles": angles.data_ptr(), "num_angles": len(angles),
            "hidden": 0 if hidden is None else hidden.data_ptr(), "sharing": self._sharing,
        }  # fmt: skip
        if parents is not None:
            tensors["parents"] = parents.data_ptr()
        return ReadyStep(is_decoding, *whole, tensors, wishes, (angles, hidden, parents))

    def follow(self, step: ReadyStep, drawn: list[Sampled]) -> None:
        """Turn a decode step without guesses into the one after it. `drawn`: what it has drawn."""
        tokens = [token for token, _, _ in drawn]
        num_positions = self.native.decoder.advance(step.tensors, tokens)
        if num_positions > step.tensors["num_angles"]:
            angles = self.native.rotary.table(num_positions, torch.float32)
            step.tensors |= {"angles": angles.data_ptr(), "num_angles": len(angles)}
            step.kept = (angles, *step.kept[1:])
        follow(step.wishes, tokens)

    def run(self, step: ReadyStep, hand_over: Callable[[], None] | None = None) -> list[Sampled]:
        """Run a step. Returns the tokens that it draws.

        Args:
            hand_over: called when nothing is left to do in Python, so the work that it wakes up runs beside the native code,
                and takes no turns with this thread.
        """
        if self._sparse is not None:
            return self._run_sparse(step, hand_over)
        return self._run_native(step, None, self._exchanged(step), hand_over)[0]

    def _run_native(
        self, step: ReadyStep, chosen: dict[str, Any] | None, exchanges: list[LayerExchange] | None,
        hand_over: Callable[[], None] | None,
    ) -> tuple[list[Sampled], str, float]:  # fmt: skip
        """Run a step. Returns what `CpuDecoder.run` does, but for the time in exchanges."""
        start = time.perf_counter()
        if hand_over is not None:
            hand_over()
        *found, waited_s = self.native.decoder.run(team(), step.tensors, step.wishes, chosen, exchanges)
        if exchanges is not None:
            seconds = time.perf_counter() - start
            self._exchanges.note(step.tokens.numel(), _phase(step.is_decoding), exchanges, seconds, waited_s)
        return tuple(found)

    def _agree(self, fault: str) -> str:
        return self.native.ranks.agree(self._exchanges.of_step(1, "decode")[-1].exchange, fault)

    def _exchanged(self, step: ReadyStep) -> list[LayerExchange] | None:
        if self._exchanges is None:
            return None
        return self._exchanges.of_step(step.tokens.numel(), _phase(step.is_decoding))

    def _run_sparse(self, step: ReadyStep, hand_over: Callable[[], None] | None) -> list[Sampled]:
        """Run a step that reads the blocks that a policy chooses, and observes what it wants to know."""
        sparse, tensors, is_decoding = self._sparse, step.tensors, step.is_decoding
        queries, lengths, tables = step.queries, step.lengths, step.tables
        seen = sparse.observe(is_decoding, queries, lengths, tables)
        if seen is not None:
            tensors["observed"] = seen.native()
        chosen = sparse.of_layers(lengths, tables) if is_decoding else None
        prompts = None if is_decoding else sparse.of_prompts(queries, lengths)
        if prompts is not None:
            tensors["prompts"] = prompts
        exchanges = self._exchanged(step)
        drawn, fault, read = self._run_native(step, chosen, exchanges, hand_over)
        if fault:  # the step writes the same keys and draws the same tokens again
            if sparse.is_on:
                sparse.switch_off(fault)
            tensors.pop("observed", None)
            tensors["is_repeated"] = True
            drawn = self.native.decoder.run(team(), tensors, step.wishes, exchanges=exchanges)[0]
        elif seen is not None:
            if exchanges is not None:
                own, replicas = torch.from_numpy(seen.weights), self.native.replicas
                seen.weights = self.native.ranks.gather_key_heads(exchanges[-1].exchange, own, replicas).numpy()
            sparse.note(seen)
        if not is_decoding and sparse.policy.selects_prompts:
            sparse.count_prompts(queries, lengths, None if fault else prompts, read)
        return drawn

    def get_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states`: [..., hidden]; returns [..., vocabulary], in float32 where the model runs natively."""
        if self.native is None:
            return super().get_logits(hidden_states)
        logits = self.native.head.multiply(hidden_states.to(self.native.dtype), wide=True)
        if self._exchanges is not None:
            exchange = self._exchanges.of_step(logits.shape[-2], "decode")[-1].exchange
            gathered = self.native.ranks.gather_logits(exchange, logits.flatten(0, -2), self.native.logits)
            logits = gathered.unflatten(0, logits.shape[:-1])
        cap = getattr(self.model, "final_logit_softcapping", None)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _bind(self, caches: Any) -> None:
        """`caches`: of each layer, as in `sagellm.engines.lmdeploy.cpu.cache`."""
        for storage in {part.untyped_storage() for layer in caches for part in layer}:
            use_huge_pages(storage.data_ptr(), storage.nbytes())
        known = describe_cache(caches, self.native.head_size)
        wanted = set() if self._sparse is None else self._sparse.policy.wanted_summaries
        of_heads = (self.native.layers, known["num_blocks"], self.native.kv_heads)
        if "bounds" in wanted:
            self._bounds = _zeros(*of_heads, 2, self.native.head_size)
            known["bounds"] = self._bounds.data_ptr()
        if "codes" in wanted:  # 2 bits a number
            self._codes = _zeros(*of_heads, known["block_size"] * self.native.head_size // 4, dtype=torch.uint8)
            known["codes"] = self._codes.data_ptr()
        if "means" in wanted:
            self._key_sums = _zeros(*of_heads, self.native.head_size, dtype=torch.int32)
            known["key_sums"] = self._key_sums.data_ptr()
        self.native.decoder.bind(known)
        self._bound = caches
        if wanted:
            self._sparse.bind_summaries(_numbers(self._bounds), _numbers(self._key_sums))


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.int64).contiguous()


def _phase(is_decoding: bool) -> str:
    return "decode" if is_decoding else "prompt"


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in large pages: it is read block by block, anywhere."""
    found = torch.empty(*shape, dtype=dtype)
    use_huge_pages(found.data_ptr(), found.nbytes)
    return found.zero_()


def _numbers(tensor: torch.Tensor | None) -> Any:
    """A read-only NumPy array over a tensor."""
    if tensor is None:
        return None
    array = tensor.numpy().view()
    array.flags.writeable = False
    return array
