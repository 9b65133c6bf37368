"""ZMQ identities: how the coordinator's ROUTER tells its peers apart."""

from __future__ import annotations


def peer_identity(role: str, uid: int) -> bytes:
    """The identity of a process: its role's first letter, then its random uid.

    Unique per process life, so no peer inherits the queue or the messages of one that died.
    """
    return role[:1].encode() + uid.to_bytes(8, "big")
