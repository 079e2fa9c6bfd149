"""An engine that answers nothing any more, below a server that does."""

import asyncio

import pytest

from sagellm.pd.group import Group
from tests.pd.below import KEY, Below


@pytest.mark.parametrize("falls_silent", [False, True])
def test_an_engine_that_is_silent_below_a_healthy_server_is_given_up(falls_silent, monkeypatch):
    monkeypatch.setattr("sagellm.pd.group.HEALTH_S", 0.05)

    async def play():
        # A healthy one has long to answer, and is watched for longer than that.
        below, group = Below(), Group(KEY, silent_s=0.3 if falls_silent else 1.5)
        await below.start()
        await group.start()
        try:
            engine = await group.join(below.url)
            below.is_silent = falls_silent
            for _ in range(400 if falls_silent else 44):
                await asyncio.sleep(0.05)
                if engine.hangs.is_set():
                    break
            await asyncio.sleep(0)
            return engine.hangs.is_set(), below.url in group.engines
        finally:
            await group.close()
            await below.close()

    assert asyncio.run(play()) == (falls_silent, not falls_silent)
