"""Connections that a server of ours accepts send each token at once."""

import asyncio
import socket

from sagellm.core.ports import listen


def test_accepted_connections_do_not_wait_for_acknowledgements():
    async def accepted() -> int:
        found = asyncio.get_running_loop().create_future()

        def seen(_, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(seen, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            number = await found
            writer.close()
            await writer.wait_closed()
            return number

    assert asyncio.run(accepted())
