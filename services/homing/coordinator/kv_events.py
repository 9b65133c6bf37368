"""What an engine tells of its cache, from the frames to the router."""

from __future__ import annotations

from homing.coordinator.loads import Slot
from homing.coordinator.router import RankRouter
from homing.errors import WireError
from homing.prefix import DIGEST_BYTES
from homing.wire import KvEvents, read_payload

MAX_DIGESTS = 2**15
"""Of each kind in one message, or it is not believed: about 10 ms of work."""

CHAINS = list[bytes]


def correct_guess(router: RankRouter, slot: Slot, events: KvEvents) -> tuple[int, int]:
    """Returns how many digests were stored and dropped. Raises `WireError`, and has done nothing,
    where the frames are not what they should be."""
    chains = read_payload(events.stored or b"\x90", CHAINS)
    dropped = bytes(events.dropped or b"")
    num_stored, num_dropped = (_count(*chains), _count(dropped))
    if (len(chains), num_dropped) != (events.num_stored, events.num_dropped):
        raise WireError(f"{len(chains)} sequences and {num_dropped} digests, other than announced")
    for chain in chains:
        router.stored(slot, chain)
    if num_dropped:
        router.dropped(slot, dropped)
    return num_stored, num_dropped


def _count(*joined: bytes) -> int:
    if any(len(digests) % DIGEST_BYTES for digests in joined):
        raise WireError(f"hashes that are no multiple of {DIGEST_BYTES} bytes")
    num_digests = sum(map(len, joined)) // DIGEST_BYTES
    if num_digests > MAX_DIGESTS:
        raise WireError(f"{num_digests} hashes; the limit is {MAX_DIGESTS}")
    return num_digests
