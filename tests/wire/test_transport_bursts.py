"""Messages that are received and sent together, in C and one by one."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator

import pytest
import zmq
from typing_extensions import Buffer

from homing.transport import Dealer, Router, SendResult, bursts, peer_identity
from homing.transport.frames import ZERO_COPY_BYTES
from tests.support.deaf_peer import deaf_peer

IDENTITY, OTHER = peer_identity("engine", 5), peer_identity("client", 6)


def dealers(router: Router, *identities: bytes) -> list[Dealer]:
    """Connected, and heard once."""
    found = [Dealer(router.address, identity) for identity in identities]
    for dealer in found:
        dealer.send([b"hello"])
    heard, deadline = 0, time.monotonic() + 30
    while heard < len(found):
        assert time.monotonic() < deadline
        heard += len(router.receive(0.05))
    return found


def hears(dealer: Dealer) -> list[list[bytes]]:
    """All that comes until nothing does."""
    return [[bytes(memoryview(f)) for f in frames] for frames in until_silent(dealer)]


def until_silent(dealer: Dealer) -> Iterator[list[Buffer]]:
    while burst := list(dealer.receive(0.3)):
        yield from burst


def test_messages_sent_together_arrive_in_order_whatever_their_frames_are(new_router):
    router = new_router(send_queue=1000)
    [first, second] = dealers(router, IDENTITY, OTHER)
    long, view = os.urandom(ZERO_COPY_BYTES), memoryview(b"a view")
    messages = [
        [b"1", b""],
        [b"2", long],
        [b"3", view],
        [b"4"],
        *([b"%d" % number, b"x" * number] for number in range(5, 100)),
    ]
    sent = [(peer, frames) for frames in messages for peer in (IDENTITY, OTHER)]
    assert router.send_all(sent) == []
    expected = [[bytes(frame) for frame in frames] for frames in messages]
    assert hears(first) == hears(second) == expected
    assert router.send_all([]) == []
    for dealer in (first, second):
        dealer.close()
    router.close()


def test_of_messages_sent_together_those_that_reach_nobody_are_told_and_the_others_go(new_router):
    router = new_router()
    [dealer] = dealers(router, IDENTITY)
    sent = [
        (b"nobody", [b"a"]),
        (IDENTITY, [b"1"]),
        (b"no one", [b"b", bytes(ZERO_COPY_BYTES)]),
        (b"nobody", [b"c"]),
        (IDENTITY, [b"2", b"3"]),
    ]
    gone = SendResult.GONE
    assert router.send_all(sent) == [(b"nobody", gone), (b"no one", gone), (b"nobody", gone)]
    assert hears(dealer) == [[b"1"], [b"2", b"3"]]
    dealer.close()
    router.close()


def test_of_messages_sent_together_to_a_peer_that_does_not_read_the_last_are_told(new_router):
    router = new_router()
    with deaf_peer(router, IDENTITY):
        [other] = dealers(router, OTHER)
        sent = [(IDENTITY, [bytes(60_000)]) for _ in range(500)]
        failed = router.send_all([*sent, (OTHER, [b"still heard"])])
    assert 0 < len(failed) < 500
    assert set(failed) == {(IDENTITY, SendResult.FULL)}
    assert hears(other) == [[b"still heard"]]
    other.close()
    router.close()


def test_what_many_peers_sent_is_received_in_one_burst_with_who_sent_it(new_router):
    router = new_router(send_queue=0)
    identities = [peer_identity("client", number) for number in range(8)]
    peers = dealers(router, *identities)
    for number in range(10):
        for dealer, identity in zip(peers, identities, strict=True):
            dealer.send([b"%d" % number, b"", identity])
    heard: dict[bytes, list[bytes]] = {identity: [] for identity in identities}
    deadline = time.monotonic() + 30
    while sum(map(len, heard.values())) < 80:
        assert time.monotonic() < deadline
        for sender, (number, empty, own) in router.receive(1):
            assert (empty, own) == (b"", sender)
            heard[sender].append(number)
    assert all(numbers == [b"%d" % n for n in range(10)] for numbers in heard.values())
    assert router.receive(0) == []
    for dealer in peers:
        dealer.close()
    router.close()


@pytest.mark.parametrize("missing", ["zmq_msg_recv", "compiler", "libzmq 4", "backend"])
def test_without_what_bursts_need_messages_go_one_by_one(tmp_path, monkeypatch, caplog, missing):
    if missing == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif missing == "libzmq 4":
        monkeypatch.setattr(zmq, "zmq_version_info", lambda: (5, 0, 0))
    elif missing == "backend":
        monkeypatch.setitem(sys.modules, "zmq.backend.cython._zmq", None)
    else:
        monkeypatch.setattr(bursts, "_OF_LIBZMQ", ("zmq_no_such_function",))
    with caplog.at_level(logging.INFO):
        router = Router("tcp://127.0.0.1:0", send_queue=10, cache_dir=tmp_path)
    assert "one by one" in caplog.text
    [dealer] = dealers(router, IDENTITY)
    assert router.send_all([(IDENTITY, [b"x"])]) == []
    assert hears(dealer) == [[b"x"]]
    dealer.close()
    router.close()
