"""How long a request waits, without any process."""

import asyncio

from sagellm.pd.bodies import Body
from sagellm.pd.group import Group
from sagellm.pd.proxy_metrics import ProxyMetrics, RequestLines
from sagellm.pd.relay import Relay, RelayOptions
from sagellm.pd.routing import Router, find_policy


def test_a_request_waits_for_engines_no_longer_than_once():
    """Each of its attempts may find that there is none: it is told so when the time of all of them is over."""
    body = Body(b"{}", {"model": "m"})

    async def waits():
        group = Group(b"k" * 32)
        relay = Relay(group, Router(find_policy("pd")), ProxyMetrics(), RequestLines(), None, RelayOptions(wait_s=0.2))
        num_waits = 0

        async def changed(timeout_s):
            nonlocal num_waits
            num_waits += 1
            await asyncio.sleep(timeout_s)

        group.changed = changed
        response, found = relay.response("/v1/completions"), []
        for _ in range(2):
            num_waits = 0
            found.append((await response._wait_for_decoder(body, set()), num_waits))
        return found

    first, second = asyncio.run(waits())
    assert first[0][0] == second[0][0] == 503 and "within 0.2 s" in second[0][1]
    assert first[1] > 0 and second[1] == 0
