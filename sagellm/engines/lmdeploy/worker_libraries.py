"""Imported by the process that workers are forked from: what they need, and nothing that starts a thread of Python's."""

import gc

gc.disable()  # it would find nothing, in a sixth of the time

from sagellm.engines.lmdeploy.libraries import load_lmdeploy, only_engine  # noqa: E402

load_lmdeploy()

import lmdeploy.pytorch.engine.executor.mp_executor  # noqa: E402
import lmdeploy.pytorch.models.qwen2  # noqa: E402, F401  # any model: what all of them import

import sagellm.engines.lmdeploy.comm  # noqa: E402
import sagellm.engines.lmdeploy.cpu.backend  # noqa: E402, F401
from sagellm.engines.lmdeploy.worker_processes import ignore_failures_of_workers  # noqa: E402

only_engine()
gc.freeze()
ignore_failures_of_workers()
