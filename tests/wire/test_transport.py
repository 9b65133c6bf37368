"""The sockets: what arrives, what a send answers, and what never blocks."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from zmq.utils import garbage

from homing.errors import ConfigError
from homing.transport import AsyncDealer, Dealer, Router, SendResult, peer_identity
from homing.transport import frames as frames_
from homing.transport.connections import SEND_BUFFER_BYTES
from homing.transport.frames import MAX_BURST, ZERO_COPY_BYTES
from tests.support.deaf_peer import deaf_peer
from tests.support.tcp_proxy import TcpProxy

IDENTITY = peer_identity("engine", 5)


def receive_one(router: Router) -> tuple[bytes, list[bytes]]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for sender, frames in router.receive(0.05):
            return sender, [bytes(memoryview(frame)) for frame in frames]
    raise AssertionError("nothing came")


@pytest.mark.parametrize("size", [0, 1, ZERO_COPY_BYTES - 1, ZERO_COPY_BYTES, 3_000_000])
def test_frames_of_every_size_arrive_whole_and_are_forwarded_as_they_came(new_router, size):
    router = new_router()
    dealer = Dealer(router.address, IDENTITY)
    payload = bytes(size)
    dealer.send([b"metadata", payload])
    assert receive_one(router) == (IDENTITY, [b"metadata", payload])
    dealer.send([b"metadata", payload])
    frames = next(frames for _, frames in router.receive(30))
    assert router.send(IDENTITY, frames) is SendResult.SENT
    echoed = next(dealer.receive(30))
    assert [bytes(memoryview(f)) for f in echoed] == [b"metadata", payload]
    assert not garbage.gc.thread, "Python's memory was lent to libzmq"
    dealer.close()
    router.close()


def send_buffers(path: str) -> list[int]:
    """Of this process's ends of connections to the Unix socket at `path`."""
    sizes: list[int] = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as end:
            if end.family == socket.AF_UNIX and path in (end.getpeername(), end.getsockname()):
                sizes.append(end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    return sizes


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it looks at its descriptors there")
def test_both_ends_of_an_ipc_connection_have_room_for_a_long_prompt(tmp_path: Path):
    granted = min(SEND_BUFFER_BYTES, int(Path("/proc/sys/net/core/wmem_max").read_text()))
    router = Router(f"ipc://{tmp_path}/s", send_queue=10)
    dealer = Dealer(router.address, IDENTITY)
    deadline = time.monotonic() + 30
    while send_buffers(f"{tmp_path}/s") != [2 * granted] * 2:  # the kernel doubles it
        assert time.monotonic() < deadline
        router.receive(0.01)
        list(dealer.receive(0.01))
    dealer.close()
    router.close()


def test_connections_that_come_and_go_unseen_hold_up_nobody_and_leave_no_descriptor(
    tmp_path: Path,
):
    """Nobody reads what libzmq tells of them, and their numbers become other files'."""
    router = Router(f"ipc://{tmp_path}/s", send_queue=10)
    descriptors = os.listdir("/dev/fd")
    for _ in range(2500):
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(30)
            visitor.connect(f"{tmp_path}/s")
            assert visitor.recv(10), "it is greeted"
    dealer = Dealer(router.address, IDENTITY)
    dealer.send([b"x"])
    assert receive_one(router) == (IDENTITY, [b"x"])
    dealer.close()
    with ExitStack() as files:
        others = [files.enter_context(open(os.devnull)) for _ in range(50)]
        router.receive(0)
        assert len(os.listdir("/dev/fd")) < len(descriptors) + len(others) + 20
    router.close()


def test_a_send_to_a_peer_that_is_not_there_says_so(new_router):
    router = new_router()
    assert router.send(b"nobody", [b"x"]) is SendResult.GONE
    dealer = Dealer(router.address, IDENTITY)
    dealer.send([b"x"])
    receive_one(router)
    dealer.close()
    deadline = time.monotonic() + 30
    while router.send(IDENTITY, [b"x"]) is not SendResult.GONE:
        assert time.monotonic() < deadline
        router.receive(0.01)
    router.close()


def test_a_peer_that_does_not_read_fills_its_queue_and_blocks_nobody(new_router):
    router = new_router()
    with deaf_peer(router, IDENTITY):
        results = {router.send(IDENTITY, [bytes(60_000)]) for _ in range(500)}
    assert SendResult.FULL in results
    router.close()


def test_a_burst_is_bounded_so_that_the_loop_gets_its_turn(new_router):
    router = new_router(send_queue=0)
    dealer = Dealer(router.address, IDENTITY)
    for _ in range(3 * MAX_BURST):
        dealer.send([b"x"])
    received, deadline = 0, time.monotonic() + 30
    while received < 3 * MAX_BURST:
        assert time.monotonic() < deadline
        burst = len(list(router.receive(1)))
        assert burst <= MAX_BURST
        received += burst
    dealer.close()
    router.close()


def test_another_thread_can_wake_a_dealer_that_waits():
    router = Router("tcp://127.0.0.1:0", send_queue=0)
    dealer = Dealer(router.address, IDENTITY)
    waker = threading.Timer(0.05, dealer.wake)
    waker.start()
    start = time.monotonic()
    assert list(dealer.receive(10)) == []
    assert time.monotonic() - start < 5
    waker.join()
    for _ in range(100_000):  # more than the pipe behind it holds
        dealer.wake()
    dealer.close()
    dealer.wake()
    router.close()


def test_an_address_that_cannot_be_bound_is_a_config_error():
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    with pytest.raises(ConfigError, match="cannot bind"):
        Router(router.address, send_queue=10)
    router.close()


def test_a_peer_that_reconnects_with_its_identity_takes_it_over_at_once():
    """Its old connection may still look alive: half-open, or not yet noticed as dead."""
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    first = Dealer(router.address, IDENTITY)
    first.send([b"first"])
    receive_one(router)
    second = Dealer(router.address, IDENTITY)
    second.send([b"second"])
    receive_one(router)
    assert router.send(IDENTITY, [b"to whom?"]) is SendResult.SENT
    assert next(second.receive(30)) == [b"to whom?"]
    first.close()
    second.close()
    router.close()


def wait_for_loss(dealer: Dealer, router: Router) -> None:
    deadline = time.monotonic() + 30
    while not dealer.lost_connection:
        assert time.monotonic() < deadline
        next(dealer.receive(0.01), None)
        router.receive(0.01)
    dealer.lost_connection = False


def test_a_connection_that_is_reset_is_told_and_made_good():
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    with TcpProxy(router.address) as network:
        dealer = Dealer(network.address, IDENTITY)
        dealer.send([b"1"])
        assert receive_one(router) == (IDENTITY, [b"1"])
        assert not dealer.lost_connection
        network.cut()
        wait_for_loss(dealer, router)
        dealer.send([b"2"])
        assert receive_one(router) == (IDENTITY, [b"2"])
        dealer.close()
    router.close()


def test_a_half_open_connection_is_told_and_made_good(monkeypatch: pytest.MonkeyPatch):
    """Nobody closed it and nothing comes through: only pings that stay unanswered show it."""
    monkeypatch.setattr(frames_, "PING_MS", 50)
    monkeypatch.setattr(frames_, "PING_TIMEOUT_MS", 200)
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    with TcpProxy(router.address) as network:
        dealer = Dealer(network.address, IDENTITY)
        dealer.send([b"1"])
        receive_one(router)
        network.freeze()
        wait_for_loss(dealer, router)
        dealer.send([b"2"])
        assert receive_one(router) == (IDENTITY, [b"2"])
        dealer.close()
    router.close()


async def test_the_asyncio_dealer_tells_of_a_lost_connection():
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    losses: list[float] = []
    with TcpProxy(router.address) as network:
        on_loss = lambda: losses.append(time.monotonic())  # noqa: E731 - one line is its name
        dealer = AsyncDealer(network.address, IDENTITY, lambda _: None, on_loss)
        dealer.send([b"1"])
        await asyncio.to_thread(receive_one, router)
        assert not losses
        network.cut()
        async with asyncio.timeout(30):
            while not losses:
                await asyncio.sleep(0.01)
        dealer.close()
    router.close()


async def test_the_asyncio_dealer_misses_no_message_of_many_that_come_while_it_sends():
    router = Router("tcp://127.0.0.1:0", send_queue=0)
    received: list[object] = []
    dealer = AsyncDealer(router.address, IDENTITY, received.append, lambda: None)
    answered, deadline = 0, time.monotonic() + 30
    for number in range(2000):
        dealer.send([str(number).encode()])
    while len(received) < 2000:
        assert time.monotonic() < deadline
        for sender, frames in router.receive(0):
            router.send(sender, frames)
            answered += 1
        await asyncio.sleep(0)
    assert received == [[str(number).encode()] for number in range(2000)]
    dealer.close()
    dealer.close()
    router.close()


async def test_what_is_no_address_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot connect to nonsense"):
        Dealer("nonsense", IDENTITY)
    with pytest.raises(ConfigError, match="cannot connect to nonsense"):
        AsyncDealer("nonsense", IDENTITY, lambda _: None, lambda: None)


def test_a_dealer_can_be_made_as_soon_as_another_is_closed():
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    for _ in range(100):
        Dealer(router.address, IDENTITY).close()
    router.close()
