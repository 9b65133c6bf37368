"""Peers: who is connected, by identity, by uid and by rank, and who may join.

A peer lives from its Hello until it leaves, is lost, or says Hello again: that is a new session,
and a new record. Senders without a record are strangers; of those only as much is kept as it takes
not to answer each of their messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from itertools import count

from homing.coordinator.loads import Slot
from homing.coordinator.records import Client, Engine, Peer, PeerState, RankId
from homing.errors import WireError
from homing.wire import Hello, ModelCard, RankInfo, read_payload

MAX_RANKS = 1024
MAX_STRANGERS = 1024


class PeerEvent(StrEnum):
    IN_STEP = "in step"  # it is in the fleet's state
    BEHIND = "behind"  # it must be told to reach the fleet's state
    LEFT = "left"
    LOST = "lost"  # it died or hangs
    CUT_OFF = "cut off"  # it lives, and this session of it is over


_S, _E = PeerState, PeerEvent
TRANSITIONS: dict[tuple[PeerState, PeerEvent], PeerState] = {
    (_S.NEW, _E.IN_STEP): _S.LIVE,
    (_S.NEW, _E.BEHIND): _S.CATCHING_UP,
    (_S.CATCHING_UP, _E.IN_STEP): _S.LIVE,
    (_S.CATCHING_UP, _E.LEFT): _S.GONE,
    (_S.CATCHING_UP, _E.LOST): _S.GONE,
    (_S.CATCHING_UP, _E.CUT_OFF): _S.GONE,
    (_S.LIVE, _E.LEFT): _S.GONE,
    (_S.LIVE, _E.LOST): _S.GONE,
    (_S.LIVE, _E.CUT_OFF): _S.GONE,
}


class Refusal(Exception):
    """A Hello cannot be accepted; the text is for its sender."""


class Peers:
    def __init__(self, *, max_clients: int) -> None:
        self._max_clients = max_clients
        self.by_identity: dict[bytes, Peer] = {}
        self.client_of_uid: dict[int, Client] = {}
        self.engine_of_rank: dict[RankId, Engine] = {}
        self.last_engine_of_rank: dict[RankId, Engine] = {}
        """Also of ranks that are gone."""

    @property
    def engines(self) -> Iterator[Engine]:
        return iter(self.engine_of_rank.values())

    @property
    def clients(self) -> Iterator[Client]:
        return iter(self.client_of_uid.values())

    def add(self, peer: Peer) -> None:
        self.by_identity[peer.identity] = peer
        if isinstance(peer, Client):
            self.client_of_uid[peer.uid] = peer
        else:
            self.engine_of_rank[peer.rank] = self.last_engine_of_rank[peer.rank] = peer

    def remove(self, peer: Peer) -> None:
        del self.by_identity[peer.identity]
        if isinstance(peer, Client):
            del self.client_of_uid[peer.uid]
        else:
            del self.engine_of_rank[peer.rank]

    def rank_infos(self) -> list[RankInfo]:
        return [
            RankInfo(rank, engine.fleet_state, engine.state is PeerState.LIVE)
            for rank, engine in sorted(self.last_engine_of_rank.items())
        ]

    def rank_of_slot(self) -> dict[Slot, RankId]:
        """Of each rank's last session."""
        return {engine.slot: rank for rank, engine in self.last_engine_of_rank.items()}

    def check_client(self, hello: Hello) -> None:
        """Raise `Refusal` unless this client may join."""
        if len(self.client_of_uid) >= self._max_clients:
            raise Refusal(f"{self._max_clients} clients are connected; that is the limit")
        self._check_uid(hello)

    def choose_rank(self, hello: Hello) -> RankId:
        """The rank that an engine gets: the one it wants, or the lowest free one.

        A wanted rank that is taken goes to a new process, which its supervisor started because
        the old one died: the caller must end the old one. A process that comes back after it was
        given up does not get it: somebody else was started in its place.
        """
        self._check_uid(hello)
        if hello.rank is None:
            rank = next(rank for rank in count() if rank not in self.engine_of_rank)
        else:
            rank = hello.rank
            if rank in self.engine_of_rank and hello.incarnation > 0:
                raise Refusal(f"rank {rank} was taken over by another engine")
        if rank >= MAX_RANKS:
            raise Refusal(f"rank {rank} is too high: the highest is {MAX_RANKS - 1}")
        return RankId(rank)

    def _check_uid(self, hello: Hello) -> None:
        if any(peer.uid == hello.uid for peer in self.by_identity.values()):
            raise Refusal(f"uid {hello.uid:x} is that of another peer")


def read_card(hello: Hello, fleet_card: ModelCard | None) -> ModelCard:
    """An engine's model card. Raises `Refusal` unless it is one, and of the fleet's model.

    All ranks must give the same answers: a request that loses its rank goes on at another.
    """
    try:
        card = read_payload(hello.model_card or b"", ModelCard)
    except WireError as error:
        raise Refusal(f"model card: {error}") from error
    if card.block_size < 1 or card.max_context_tokens < 1:
        raise Refusal("model card: block size and context length must be at least 1")
    for field in ("name", "block_size", "max_context_tokens", "vocab_size", "eos_token_ids"):
        ours, theirs = getattr(fleet_card, field, None), getattr(card, field)
        if fleet_card is not None and ours != theirs:
            raise Refusal(f"model card: {field} is {theirs}; the fleet's is {ours}")
    return card


class Strangers:
    """Senders without a record: when each was last told to rejoin. Bounded; the oldest go first."""

    def __init__(self, *, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_at: OrderedDict[bytes, float] = OrderedDict()
        self._warned: OrderedDict[bytes, None] = OrderedDict()

    def may_tell(self, sender: bytes, now: float) -> bool:
        """Whether it is time to tell this sender (again); counts as having told it."""
        if now - self._told_at.get(sender, -self._interval_s) < self._interval_s:
            return False
        self._told_at[sender] = now
        self._told_at.move_to_end(sender)
        if len(self._told_at) > MAX_STRANGERS:
            self._told_at.popitem(last=False)
        return True

    def may_warn(self, sender: bytes) -> bool:
        """Whether this sender's garbage has not been logged yet; counts as having logged it."""
        if sender in self._warned:
            return False
        self._warned[sender] = None
        if len(self._warned) > MAX_STRANGERS:
            self._warned.popitem(last=False)
        return True

    def forget(self, sender: bytes) -> None:
        self._told_at.pop(sender, None)
