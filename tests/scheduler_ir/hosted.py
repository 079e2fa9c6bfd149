"""A plug-in behind a host, for the tests' engine."""

from sagellm.core.hooks import Plugin


class Hosted(Plugin):
    """Asks as an engine does: through the host, which switches a plug-in off that raises."""

    def __init__(self, host):
        self.host = host

    def schedule(self, view):
        decided = self.host.decide("schedule", view, lambda answer: answer)
        return None if decided is None else decided[1]

    def on_step_end(self, result):
        self.host.notify("on_step_end", result)

    def on_request_end(self, request_id):
        self.host.notify("on_request_end", request_id)
