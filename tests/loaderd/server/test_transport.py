"""The ROUTER for other hosts."""

import asyncio

import pytest
import zmq

from loaderd.api.protocol import ErrorReply, Heartbeat, decode_daemon
from loaderd.api.tcp import parse_tcp
from loaderd.server.transport import TcpRouter
from tests.loaderd.harness import WAIT_S
from tests.remotes import free_address


def test_a_message_that_cannot_be_encoded_leaves_the_next_one_whole():
    """Names of files may hold bytes that are no text; nothing of such a message may be sent."""

    async def exchange() -> bytes:
        address = free_address()
        come: asyncio.Queue[bytes] = asyncio.Queue()
        router = TcpRouter(
            parse_tcp(address), lambda identity, *_: come.put_nowait(identity), None, None
        )
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 2000)
            dealer.connect(address)
            dealer.send(b"x")
            identity = await asyncio.wait_for(come.get(), WAIT_S)
            bad = ErrorReply(error="", message="\udcff", request=1, session=-1, run=-1)
            with pytest.raises(UnicodeEncodeError):
                router.send(identity, bad)
            assert router.send(identity, Heartbeat(token=7))
            return b"".join(dealer.recv_multipart())
        finally:
            dealer.close()
            context.term()
            router.close()

    assert decode_daemon(asyncio.run(exchange())) == Heartbeat(token=7)
