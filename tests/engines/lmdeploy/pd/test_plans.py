"""A plan that is split over a prefill and a decode engine: each carries out its part, transfers included."""

from sagellm.core.config import PluginSpec
from sagellm.replay.schedule.verify import verify_schedule
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType, kv_value, token_value
from sagellm.scheduler_ir.pd_costs import PDCosts
from sagellm.scheduler_ir.pd_separator import Instance, PDSeparator, Role
from sagellm.scheduler_ir.plan import ExecutionPlan
from tests.engines.lmdeploy.guesses import tokens_of
from tests.engines.lmdeploy.pd.pair import NEW, Pair
from tests.plugins import plugin_of
from tests.reference import make_prompts

PROMPT = 100
COSTS = PDCosts(prefill_token_s=1.0)  # a prompt on the decode engine would hold its eight streams up


def split_plan(request: int):
    start = {"request": request, "start": 0, "tokens": PROMPT}
    graph = IRGraph([
        IRNode("read", NodeType.PREFILL_CHUNK, (), (kv_value(request, PROMPT), "logits"), start),
        IRNode("first", NodeType.SAMPLE, ("logits",), (token_value(request, PROMPT),), {"requests": [request]}),
        IRNode("write", NodeType.DECODE_STEP, (kv_value(request, PROMPT), token_value(request, PROMPT)), ("more",),
               {"requests": [request]}),
    ])  # fmt: skip
    instances = [Instance("d0", Role.DECODE, num_running=8), Instance("p0", Role.PREFILL)]
    split = PDSeparator().split(ExecutionPlan(f"plan{request}", graph, (request,)), instances, COSTS)
    assert split.is_split
    return {part.target_instance_id: part for part in split.plans}


def executor(name: str) -> PluginSpec:
    options = {"strategy": "fifo", "instance_id": name}
    return PluginSpec(name="sagellm.scheduler_ir.strategy_plugin:StrategyPlugin", options=options)


def test_a_split_plan_is_carried_out_by_both_engines(start_engine, tmp_path, reference):
    prompts = make_prompts((PROMPT, PROMPT), seed=8)
    record = tmp_path / "events.jsonl"
    decode = {"plugins": (executor("d0"),), "record": record}
    engines = Pair(start_engine, tmp_path, decode_config=decode, plugins=(executor("p0"),))
    parts = split_plan(0)
    for name, engine in (("p0", engines.prefill), ("d0", engines.decode)):
        assert not plugin_of(engine).submit_plan(parts[name]).refused()
    assert tokens_of(engines.ask(prompts[:1])) == reference(prompts[:1], NEW)
    for name, engine in (("p0", engines.prefill), ("d0", engines.decode)):
        status = plugin_of(engine).status(parts[name].plan_id)
        assert status.state.value == "done" and not status.refused(), status
        moves = {node.detail for key, node in status.nodes.items() if key.startswith(("send", "take"))}
        assert moves == {"the other engine has read it" if name == "p0" else "its keys and values arrived"}
    # A request that comes without the keys and values: computed where it decodes, and it is said.
    parts = split_plan(1)
    plugin_of(engines.decode).submit_plan(parts["d0"])
    engines.decode.hooks.pd.arrivals._timeout_s = 0.2
    assert tokens_of(engines.ask(prompts[1:], to_prefill=False)) == reference(prompts[1:], NEW)
    refused = plugin_of(engines.decode).status(parts["d0"].plan_id).refused()
    assert refused and all("what is missing is computed here" in why for why in refused.values())
    engines.decode.close()
    found = verify_schedule(record)
    assert found.agrees and found.num_plans == 2, found.differences[:3]
