"""The `sagellm` command as tests call it, in this process."""

from click.testing import CliRunner, Result

from sagellm.cli import main


def run_sagellm(*words: object) -> Result:
    """Run `sagellm` with these words."""
    return CliRunner().invoke(main, [*map(str, words)])
