"""The console command `sagellm`: one file a sub-command."""

from sagellm.cli.main import main

__all__ = ["main"]
