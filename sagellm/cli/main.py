"""The console command: names and help lines of its commands. Each command is imported when it is called."""

import click

from sagellm.cli.lazy import LazyGroup, at

COMMANDS = {
    "serve": (at("sagellm.serve.command:serve"), "Serve a model over the OpenAI API."),
    "up": (at("sagellm.cli.control:up"), "Start a manager: many engines behind one address."),
    "engine": (at("sagellm.cli.control:engine"), "Start, list, drain and stop engines of the running manager."),
    "infer": (at("sagellm.cli.control:infer"), "Answer a prompt through the running manager."),
    "patches": (at("sagellm.cli.patches:patches"), "Apply, check, show or reverse the patches on LMDeploy."),
    "model": (at("sagellm.cli.model:model"), "List, get, describe and remove models."),
    "demo-model": (at("sagellm.demo_model.command:demo_model"), "Build the demo model, or print its folder."),
    "list": (at("sagellm.cli.kinds:list_kinds"), "List the kinds of plug-ins, or the plug-ins of one kind."),
    "check": (at("sagellm.cli.kinds:check"), "Check a plug-in against the contract of its kind."),
    "policy": (at("sagellm.cli.kinds:policy"), "List the eviction policies, or check one."),
    "strategy": (at("sagellm.cli.kinds:strategy"), "List the scheduling strategies, or check one."),
    "speculative": (at("sagellm.cli.speculative:speculative"), "List, check, measure and plan speculative strategies."),
    "comm": (at("sagellm.cli.kinds:comm"), "Measure communication, list backends and channels, or check one."),
    "pd": (at("sagellm.cli.pd:pd"), "Run prefill and decode on engines of their own, with a proxy."),
    "topology": (at("sagellm.cli.topology:topology"), "Show how the devices of this machine are connected."),
    "replay": (at("sagellm.cli.replay:replay"), "Replay a trace or a recorded log without an engine."),
    "evaluate": (at("sagellm.cli.evaluate:evaluate"), "Measure the quality of a model, or of an engine's settings."),
    "quantize": (at("sagellm.cli.quantize:quantize"), "Quantize a model's weights, or report what that cost."),
    "sot": (at("sagellm.cli.sot:sot"), "Answer a question as a plan whose points are written side by side."),
    "cot": (at("sagellm.cli.cot:cot"), "Answer a question by chains of thought, and let them vote."),
    "plan": (at("sagellm.cli.plan:plan"), "Plan for memory, or engines for latency targets under a load."),
    "profile": (at("sagellm.cli.profile:profile"), "Measure an engine under load, for plans."),
    "doctor": (at("sagellm.cli.doctor:doctor"), "Report what this machine can run and what is missing."),
}


main = LazyGroup(COMMANDS, name="sagellm", help="A laboratory for LLM inference on LMDeploy 0.11.0.")
click.version_option(package_name="sagellm")(main)
