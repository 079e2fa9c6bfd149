"""Schedules as data: a graph of typed nodes, passes over it, plans that an engine carries out, and strategies that decide."""

from sagellm.scheduler_ir import passes as passes  # gives IRGraph.optimize its default passes
