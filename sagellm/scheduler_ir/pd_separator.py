"""Prompts on one instance, decoding on another: where that pays, and the plans for it.

Source: the idea of DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024); staying on the instance that
decodes where a split does not pay is what NVIDIA Dynamo calls conditional disaggregation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.pd_costs import PDCosts
from sagellm.scheduler_ir.pd_cut import crossings, cut_plan
from sagellm.scheduler_ir.plan import ExecutionPlan

__all__ = ["Estimate", "Instance", "PDSeparator", "Role", "SplitDecision"]

OF_PREFILL = (NodeType.PREFIX_FETCH, NodeType.KV_LOAD, NodeType.PREFILL_CHUNK)
OF_DECODE = (NodeType.DECODE_STEP, NodeType.VERIFY)


class Role(str, Enum):
    PREFILL = "prefill"
    DECODE = "decode"  # computes a prompt where a split does not pay
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Instance:
    """An engine. `load_s`: seconds of work that wait there; `num_running`: streams that decode there; blocks of
    `block_size` tokens.

    Raises:
        PlanError: an empty id, an unknown role, or a number out of range.
    """

    instance_id: str
    role: Role = Role.HYBRID
    load_s: float = 0.0
    num_running: int = 0
    free_blocks: int = 2**31
    block_size: int = 64

    def __post_init__(self) -> None:
        if not (isinstance(self.instance_id, str) and self.instance_id):
            raise PlanError(f"instance id {self.instance_id!r}; give a text that is not empty.")
        try:
            object.__setattr__(self, "role", Role(self.role))
        except ValueError:
            known = ", ".join(role.value for role in Role)
            raise PlanError(f"instance {self.instance_id}: role {self.role!r}; give one of {known}.") from None
        if not 0 <= self.load_s < math.inf or self.num_running < 0 or self.free_blocks < 0 or self.block_size < 1:
            raise PlanError(f"{self}; give load_s, num_running and free_blocks from 0 on, block_size from 1 on.")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of one choice of places. `stream_s`: seconds that all streams together spend on it, which decides: each
    request of the
    plan until its last token, and what streams that decode beside its prefill are late.

    `prefill_s`, `decode_s`, `transfer_s`: of the plan's own steps and transfers; `stall_s`: the part that is others'.
    """

    prefill_on: str
    decode_on: str
    stream_s: float
    prefill_s: float
    decode_s: float
    transfer_s: float
    transfer_bytes: int
    stall_s: float

    def __str__(self) -> str:
        where = self.prefill_on if self.prefill_on == self.decode_on else f"{self.prefill_on} then {self.decode_on}"
        return (
            f"{where}: {self.stream_s:.4g} stream seconds (prefill {self.prefill_s:.4g} s, decode {self.decode_s:.4g} s, "
            f"{self.transfer_bytes} bytes moved in {self.transfer_s:.4g} s, others late by {self.stall_s:.4g} s)"
        )


@dataclass(frozen=True)
class SplitDecision:
    """`plans`: one for each instance that takes part; its executor carries it out. `together`, `apart`: the best of either
    kind, or None."""

    plans: tuple[ExecutionPlan, ...]
    is_split: bool
    reason: str
    together: Estimate | None
    apart: Estimate | None


class PDSeparator:
    """Places what belongs to prompts on one instance and the rest on another, or all of it on one.

    A plan goes to at most two instances: its decode steps are those of one batch. Every pair is looked at. A target that the
    plan names keeps its part: decoding if its role allows that, else the prompts.
    """

    def split(self, plan: ExecutionPlan, instances: Sequence[Instance], costs: PDCosts) -> SplitDecision:
        """O(pairs of instances * nodes).

        Raises:
            PlanError: no instance, one twice, none that decodes though the plan does, a target that is not among them, a cycle,
                or no instance with enough free blocks.
        """
        self._check(plan, instances)
        of_decode = _of_decode(plan)
        has_prefill, has_decode = not all(of_decode.values()), any(of_decode.values())
        prefills = [one for one in instances if one.role is not Role.DECODE] if has_prefill else []
        decodes = [one for one in instances if one.role is not Role.PREFILL]
        if has_decode and not decodes:
            raise PlanError(f"plan {plan.plan_id} decodes, and all instances are for prefill; add one that decodes.")
        # A plan of prompts alone needs none that decodes.
        wholes = decodes if has_decode or not prefills else list(dict.fromkeys([*prefills, *decodes]))
        if plan.target_instance_id:
            wholes = [one for one in wholes if one.instance_id == plan.target_instance_id]
        pairs = [(one, one) for one in wholes]
        if has_prefill and has_decode:
            pairs += [(first, second) for first in prefills for second in decodes if first is not second]
            if plan.target_instance_id:
                is_decoder = any(one.instance_id == plan.target_instance_id for one in decodes)
                pairs = [pair for pair in pairs if pair[is_decoder].instance_id == plan.target_instance_id]
        found = [
            (estimate, pair) for pair in pairs
            if (estimate := self._estimate(plan, of_decode, *pair, costs)) is not None
        ]  # fmt: skip
        if not found:
            free = {one.instance_id: one.free_blocks for one in instances}
            raise PlanError(
                f"plan {plan.plan_id}: no instance has blocks for its {sum(_lengths(plan).values())} tokens; free are {free}. "
                "Wait, or add one."
            )
        together = min((each for each, (first, second) in found if first is second), key=_cost, default=None)
        apart = min((each for each, (first, second) in found if first is not second), key=_cost, default=None)
        return self._decision(plan, of_decode, costs, together, apart)

    def _decision(
        self, plan: ExecutionPlan, of_decode: dict[str, bool], costs: PDCosts, together: Estimate | None, apart: Estimate | None
    ) -> SplitDecision:
        is_split = apart is not None and (together is None or apart.stream_s < together.stream_s)
        best = apart if is_split else together
        assert best is not None  # one of them was found
        if together is None or apart is None:
            reason = f"no other choice than {best}"
        else:
            reason = f"the split {'pays' if is_split else 'does not pay'}: apart on {apart}; together on {together}"
        place = {name: best.decode_on if decodes else best.prefill_on for name, decodes in of_decode.items()}
        plans = cut_plan(plan, place, costs, best.decode_on)
        return SplitDecision(tuple(plans), len(plans) > 1, reason, together, apart)

    def _check(self, plan: ExecutionPlan, instances: Sequence[Instance]) -> None:
        names = [one.instance_id for one in instances]
        if not names:
            raise PlanError(f"plan {plan.plan_id}: there are no instances; give at least one.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PlanError(f"instances {twice} are given twice; name each once.")
        if plan.target_instance_id and plan.target_instance_id not in names:
            raise PlanError(f"plan {plan.plan_id} is for instance {plan.target_instance_id!r}; known are {names}.")

    def _estimate(
        self, plan: ExecutionPlan, of_decode: dict[str, bool], first: Instance, second: Instance, costs: PDCosts
    ) -> Estimate | None:
        """None where blocks are missing, or something would have to cross that no transfer can carry."""
        needs = _lengths(plan).values()
        if any(sum(-(-tokens // one.block_size) for tokens in needs) > one.free_blocks for one in (first, second)):
            return None
        num = len(plan.request_ids)
        is_one = first is second
        prefill_s = sum(_prefill_s(node, costs) for node in plan.ir_graph)
        num_bytes, transfer_s = 0, 0.0
        if not is_one:
            place = {name: (second if decodes else first).instance_id for name, decodes in of_decode.items()}
            try:
                moved = crossings(plan.ir_graph, place, costs)
            except PlanError:
                return None
            num_bytes = sum(one.num_bytes for one in moved)
            transfer_s = sum(costs.transfer_s(one.source, one.target, one.num_bytes) for one in moved)
        steps = [node for node in plan.ir_graph if node.node_type in OF_DECODE]
        context = sum(_lengths(plan).values())
        decode_s = sum(costs.decode_s(second.num_running + len(node.requests), context) for node in steps)
        stall_s = first.num_running * costs.interference * prefill_s
        wait_s = max(first.load_s + prefill_s + transfer_s, 0.0 if is_one else second.load_s)
        return Estimate(
            first.instance_id, second.instance_id, num * (wait_s + decode_s) + stall_s, prefill_s, decode_s, transfer_s,
            num_bytes, stall_s,
        )  # fmt: skip


def _cost(estimate: Estimate) -> float:
    return estimate.stream_s


def _of_decode(plan: ExecutionPlan) -> dict[str, bool]:
    """By node id, in topological order, whether it goes where the plan decodes. Nodes of neither kind follow what they take
    from: the first token is drawn where its prompt was computed."""
    found: dict[str, bool] = {}
    for node in plan.ir_graph.topological_order():
        if node.node_type in OF_PREFILL:
            found[node.node_id] = False
        else:
            before = plan.ir_graph.predecessors(node.node_id)
            found[node.node_id] = node.node_type in OF_DECODE or any(found[name] for name in before)
    return found


def _prefill_s(node: IRNode, costs: PDCosts) -> float:
    if node.node_type is not NodeType.PREFILL_CHUNK:
        return 0.0
    return costs.prefill_s(node.config["tokens"], node.config["start"])


def _lengths(plan: ExecutionPlan) -> dict[int, int]:
    """By request, how many tokens' keys and values it has in the end, as far as the nodes tell."""
    lengths: dict[int, int] = {}
    decoded: dict[int, int] = {}
    for node in plan.ir_graph:
        if "tokens" in node.config and node.requests:
            request = node.requests[0]
            lengths[request] = max(lengths.get(request, 0), node.config.get("start", 0) + node.config["tokens"])
        elif node.node_type in OF_DECODE:
            for request in node.requests:
                decoded[request] = decoded.get(request, 0) + 1
    return {request: lengths.get(request, 0) + decoded.get(request, 0) for request in {**lengths, **decoded}}
