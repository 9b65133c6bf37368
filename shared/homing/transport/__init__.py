"""Sockets that carry multipart messages; the only package that imports zmq.

Knows nothing of what the frames mean. No call here blocks on a peer: a send answers at once
whether the message was taken, a receive waits no longer than it is told.
"""

from homing.transport.asyncio_dealer import AsyncDealer
from homing.transport.dealer import Dealer
from homing.transport.frames import MAX_BURST
from homing.transport.identity import peer_identity
from homing.transport.keys import Keys, read_keys, write_keys
from homing.transport.router import Router, SendResult

__all__ = [
    "MAX_BURST",
    "AsyncDealer",
    "Dealer",
    "Keys",
    "Router",
    "SendResult",
    "peer_identity",
    "read_keys",
    "write_keys",
]
