"""Imported by the process that workers are forked from: what they need, and nothing that starts a thread of Python's."""

import gc

gc.disable()  # it would find nothing, in a sixth of the time

import lmdeploy.pytorch.engine.executor.mp_executor  # noqa: E402
import lmdeploy.pytorch.models.qwen2  # noqa: E402, F401  # any model: what all of them import
import torch  # noqa: E402

import sagellm.engines.lmdeploy.comm  # noqa: E402
import sagellm.engines.lmdeploy.cpu.backend  # noqa: E402, F401
from sagellm.engines.lmdeploy.worker_processes import ignore_failures_of_workers  # noqa: E402

# Random numbers that the model's weights replace would take a second of each worker.
torch.nn.Embedding.reset_parameters = lambda self: None
gc.freeze()
ignore_failures_of_workers()
