"""Errors that end a benchmark or a judgement, each with its exit code."""

from sagellm.core.errors import SageError


class BenchmarkError(SageError):
    """Misuse: a bad config, a file that cannot be read, a result of another schema. Exit code 2."""


class ServerDied(SageError):
    """The server under test ended or stopped answering; what was measured until then is kept, marked failed."""
