"""Sockets that carry multipart messages; the only package that imports zmq.

Knows nothing of what the frames mean. No call here blocks on a peer: a send answers at once
whether the message was taken, a receive waits no longer than it is told.
"""

from homing.transport.asyncio_dealer import AsyncDealer
from homing.transport.dealer import Dealer
from homing.transport.frames import MAX_BURST
from homing.transport.identity import peer_identity
from homing.transport.keys import Keys, read_keys, write_keys
from homing.transport.loans import (
    MAX_LOAN_BYTES,
    MIN_LOAN_BYTES,
    Lender,
    Loan,
    borrow,
    may_lend,
)
from homing.transport.router import Router, SendResult

__all__ = [
    "MAX_BURST",
    "MAX_LOAN_BYTES",
    "MIN_LOAN_BYTES",
    "AsyncDealer",
    "Dealer",
    "Keys",
    "Lender",
    "Loan",
    "Router",
    "SendResult",
    "borrow",
    "may_lend",
    "peer_identity",
    "read_keys",
    "write_keys",
]
