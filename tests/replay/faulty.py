"""Policies with a fault each, and no idea of PolicyError."""

from tests.replay.policies import Recency


class Raising(Recency):
    def on_insert(self, block):
        return 1 // 0


class Leaving(Recency):
    def on_hit(self, key, time_s=0.0):
        raise SystemExit(5)


class Endless(Recency):
    def select_victims(self, context):
        return self.select_victims(context)


class Answerless(Recency):
    def select_victims(self, context):
        return None


class Listing(Recency):
    def select_victims(self, context):
        return list(self.order)[: context.count]


class Wordy(Recency):
    def select_victims(self, context):
        return super().select_victims(context)._replace(victims=("oldest",))


class Unbuilt(Recency):
    def __init__(self, capacity, **options):
        raise OSError("no such model")


class Nameless(Recency):
    name = None
