"""Processes of engines with workers, and the lines that these have written."""

import json

import psutil


def children():
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


def workers_of(engine):
    return [worker._proc for worker in engine.engine.executor.procs]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
