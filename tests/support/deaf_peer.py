"""A peer that is heard and does not read: what is sent to it soon waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from homing.transport import Router


@contextmanager
def deaf_peer(router: Router, identity: bytes) -> Iterator[None]:
    """Connected, and heard once."""
    deaf = zmq.Context.instance().socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.setsockopt(zmq.IDENTITY, identity)
    deaf.connect(router.address)
    deaf.send_multipart([b"x"])
    assert router.receive(30)
    try:
        yield
    finally:
        deaf.close(linger=0)
