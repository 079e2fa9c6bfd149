"""A process that owns KV blocks of known content and lets others read them; started by tests that stop and kill it.

`python -m tests.comm_backend.kv_transfer.owner NAME JSON`: the JSON has `layout`, `key`, `seed` and `options`. It prints its
endpoint, a line of JSON, and ends when its standard input does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from sagellm.comm_backend.kv_transfer.base import TransferEndpoint, TransferOptions
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart, KVRegion
from sagellm.comm_backend.kv_transfer.registry import find_channel, make_channel

ROOT = Path(__file__).parents[3]


def layout(num_blocks=8, block_size=4, layers=2, heads=2, width=8, rank=0, ranks=1, total_heads=None, dtype="float32"):
    parts = tuple(KVPart(name=name, num_heads=heads, width=width, dtype=dtype) for name in ("keys", "values"))
    return KVLayout(
        num_layers=layers, num_blocks=num_blocks, block_size=block_size, total_heads=total_heads or heads * ranks,
        first_head=rank * heads, tp_rank=rank, tp_size=ranks, parts=parts,
    )  # fmt: skip


def content(of, seed):
    """[layers, blocks, block_size, heads, width] of each part, all values different, the same in every process."""
    rng = np.random.default_rng([seed, of.tp_rank])
    return [
        torch.from_numpy(rng.standard_normal(of.shape(part), dtype=np.float32)).to(getattr(torch, part.dtype))
        for part in of.parts
    ]


def region(name, of, seed=None):
    """In memory as the channel wants it; zeros without a seed."""
    kind = find_channel(name)
    tensors = tuple(kind.empty(of.shape(part), getattr(torch, part.dtype)) for part in of.parts)
    for tensor, values in zip(tensors, content(of, seed) if seed is not None else [0] * len(tensors), strict=True):
        tensor[:] = values
    return KVRegion(of, tensors)


class OwnerProcess:
    """The other process, from the side of a test."""

    def __init__(self, name, of, seed=1, key=b"a key of the group", options=None):
        order = json.dumps({"layout": of.model_dump(mode="json"), "key": key.decode(), "seed": seed, "options": options or {}})
        self.layout, self.seed = of, seed
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.comm_backend.kv_transfer.owner", name, order],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        # A library may print to stdout, too.
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        assert line, "the owner has ended"
        self.endpoint = TransferEndpoint.model_validate_json(line)

    def content(self):
        return content(self.layout, self.seed)

    def stop(self):
        """It stands still. Returns when it does."""
        self.process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main(name, order):
    order = json.loads(order)
    of = KVLayout.model_validate(order["layout"])
    options = TransferOptions(key=order["key"].encode(), options=order["options"])
    channel = make_channel(name, region(name, of, order["seed"]), options)
    print(channel.endpoint().model_dump_json(), flush=True)
    sys.stdin.read()
    channel.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
