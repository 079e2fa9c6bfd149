"""Communication backends of a user, which worker processes import by name."""

import os
from pathlib import Path

from sagellm.comm_backend.torch_groups import GlooBackend
from sagellm.core.errors import CommError


class CountingGloo(GlooBackend):
    """Leaves the number of its sums in a file of its rank."""

    name = "counting-gloo"
    sums = 0

    def all_reduce(self, tensor, *args, **options):
        self.sums += 1
        return super().all_reduce(tensor, *args, **options)

    def close(self):
        Path(os.environ["SAGELLM_TEST_FOLDER"], f"sums-{self.rank}").write_text(str(self.sums))
        super().close()


class LosesItsLink(GlooBackend):
    """Rank 1 raises an error at its tenth sum."""

    name = "loses-its-link"
    sums = 0

    def all_reduce(self, tensor, *args, **options):
        self.sums += 1
        if self.rank == 1 and self.sums == 10:
            raise CommError("the link is down")
        return super().all_reduce(tensor, *args, **options)
