"""Gathers the sub-commands; each is imported only when it is called, so that `--help` answers at once."""

from importlib import import_module

import click

COMMANDS = {
    "serve": ("sagellm.serve.command", "serve", "Serve a model over the OpenAI API."),
    "patches": ("sagellm.cli.patches", "patches", "Apply, check, show or reverse the patches on LMDeploy."),
    "demo-model": ("sagellm.demo_model.command", "demo_model", "Build the demo model, or say where it is."),
    "policy": ("sagellm.cli.policy", "policy", "List the eviction policies, or check one."),
    "strategy": ("sagellm.cli.strategy", "strategy", "List the scheduling strategies, or check one."),
    "speculative": ("sagellm.cli.speculative", "speculative", "List, check and plan speculative strategies."),
    "comm": ("sagellm.cli.comm", "comm", "List the communication backends, or check one."),
    "pd": ("sagellm.pd.command", "pd", "Prefill and decoding on engines of their own, behind a proxy."),
    "topology": ("sagellm.cli.topology", "topology", "Show how this machine's devices are connected."),
    "replay": ("sagellm.cli.replay", "replay", "Run a trace through policies, or a recorded log again."),
    "doctor": ("sagellm.cli.doctor", "doctor", "Say what this machine can run and what is missing."),
}


class _Lazy(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        return getattr(import_module(module), attribute)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.command(cls=_Lazy)
@click.version_option(package_name="sagellm")
def main() -> None:
    """A laboratory for LLM inference on LMDeploy 0.11.0."""
