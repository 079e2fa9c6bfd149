"""A KV channel that waits where a test wants it: in the middle of a transfer, of a real engine."""

import time
from pathlib import Path

from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.shm import ShmChannel


class HeldOptions(Model):
    """`folder`: while the file `hold` is in it, transfers wait before their first byte; each leaves a file `began`."""

    folder: Path


class HeldShm(ShmChannel):
    name = "held"
    Options = HeldOptions

    def _read_tokens(self, link, conversion, tokens, run):
        folder = self.own_options.folder
        while (folder / "hold").exists():
            (folder / "began").touch()
            run.check()
            time.sleep(0.005)
        super()._read_tokens(link, conversion, tokens, run)
