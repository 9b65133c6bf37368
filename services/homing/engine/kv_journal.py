"""KvJournal: which prefixes this replica has come to hold, and which it holds no more.

The coordinator guesses what each rank holds from the prompts that it sent there. The guess is wrong
where blocks were evicted or their prompt never computed, and it knows nothing of answers. What is
noted here corrects it, with each heartbeat.

Only blocks at routing points count: the coordinator knows of no others. An eviction takes a block
before its parent, and so does what is told of it: of a prompt that is partly held, the coordinator
never hears that a block is there and the one before it is not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from homing.engine.request import Request, RequestKey
from homing.prefix import BlockHash, last_common_point, routing_points
from homing.wire import KvEvents, pack_payload

MAX_DIGESTS = 4096
"""Told in one message, of each kind; what is more waits for the next one."""
MAX_WAITING_DIGESTS, MAX_WAITING_REQUESTS = 2**16, 1024
"""Beyond these the oldest is never told: there the guess stays a guess, until it expires."""


class KvJournal:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: set[BlockHash] = set()  # at routing points, in the pool's index
        self._dropped: OrderedDict[BlockHash, None] = OrderedDict()  # since it was told last
        # request -> its hashes, and at which depths they are to be told
        self._stored: OrderedDict[RequestKey, tuple[list[BlockHash], Sequence[int]]] = OrderedDict()

    def found(self, request: Request) -> None:
        """A request was admitted, and its first blocks were in the index."""
        if 0 < self._depth_of_prompt(request) <= request.num_registered:
            self._hold(request.hashes[self._depth_of_prompt(request) - 1])

    def computed(self, request: Request, before: int) -> None:
        """A request's blocks `[before, num_registered)` came into the index."""
        reached, prompt = request.num_registered, self._depth_of_prompt(request)
        common = last_common_point(reached)
        points = routing_points(common)
        if before < prompt <= reached and prompt not in points:
            points = sorted((*points, prompt))
        if not points or points[-1] <= before:
            return
        for depth in points[bisect_right(points, before) :]:
            self._hold(request.hashes[depth - 1])
        self._stored[request.key] = (request.hashes, points)
        self._stored.move_to_end(request.key)
        if len(self._stored) > MAX_WAITING_REQUESTS:
            self._stored.popitem(last=False)

    def ended(self, request: Request) -> None:
        """Call it before the request gives its blocks back. What it did not compute of its prompt,
        the coordinator believes to be here."""
        depth = self._depth_of_prompt(request)
        if request.num_registered < depth <= len(request.hashes):
            for point in reversed(routing_points(depth)):
                if request.hashes[point - 1] not in self._held:
                    self._drop(request.hashes[point - 1])

    def evicted(self, block_hash: BlockHash) -> None:
        if block_hash in self._held:
            self._held.remove(block_hash)
            self._drop(block_hash)

    def cleared(self) -> None:
        """The index was emptied."""
        for block_hash in self._held:
            self._drop(block_hash)
        self._held.clear()
        self._stored.clear()

    def forget(self) -> None:
        """A new session begins, and nothing is believed of this rank."""
        self._dropped.clear()
        self._stored.clear()

    def take(self) -> KvEvents | None:
        """What there is to tell; None if nothing is."""
        chains: list[bytes] = []
        room = MAX_DIGESTS
        while self._stored and len(next(iter(self._stored.values()))[1]) <= room:
            _, (hashes, points) = self._stored.popitem(last=False)
            chains.append(b"".join(hashes[depth - 1] for depth in points))
            room -= len(points)
        dropped = list(islice(self._dropped, MAX_DIGESTS))
        for block_hash in dropped:
            del self._dropped[block_hash]
        if not chains and not dropped:
            return None
        return KvEvents(
            len(chains),
            len(dropped),
            stored=pack_payload(chains) if chains else None,
            dropped=b"".join(dropped) if dropped else None,
        )

    def _depth_of_prompt(self, request: Request) -> int:
        """The last routing point of the prompt that the coordinator saw, in blocks."""
        return request.num_submitted // self._block_size

    def _hold(self, block_hash: BlockHash) -> None:
        self._held.add(block_hash)
        self._dropped.pop(block_hash, None)

    def _drop(self, block_hash: BlockHash) -> None:
        self._dropped[block_hash] = None
        if len(self._dropped) > MAX_WAITING_DIGESTS:
            self._dropped.popitem(last=False)
