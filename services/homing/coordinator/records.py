"""What the coordinator remembers of its peers and their requests: plain records, no behaviour.

    client uid -> Client --requests--> Request <--requests-- Engine <- rank
                     ^-----------client---|--engine-----------^

A request is in its client's and in its engine's collection, or in neither. A record belongs to one
session: whoever says Hello again gets a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

from msgspec import Struct

from homing.coordinator.loads import Slot
from homing.coordinator.router import Decision
from homing.coordinator.step_model import StepSums
from homing.wire import FleetState, Heartbeat, Hello

RankId = NewType("RankId", int)


class PeerState(StrEnum):
    NEW = "new"  # its Hello is being looked at
    CATCHING_UP = "catching up"  # an engine that was told to join the fleet's state: gets no work
    LIVE = "live"
    GONE = "gone"


class RequestState(StrEnum):
    NEW = "new"
    RUNNING = "running"  # an engine has it
    ABORTING = "aborting"  # its client asked to end it; its engine will say that it did
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Client:
    identity: bytes
    uid: int
    last_seen: float
    state: PeerState = PeerState.NEW
    sent_garbage: bool = False
    requests: dict[int, Request] = field(default_factory=dict[int, "Request"])
    """request id -> the attempt of it that is alive"""

    def __str__(self) -> str:
        return f"client {self.uid:x}"


Holder = Client | int
"""Who a request counts for while places are short: its client, or the tenant that it names."""


class Owed(NamedTuple):
    """A command that an engine was told and has not answered."""

    deadline: float
    epoch: int | None
    """At which it leaves the engine; None: it moves no epoch."""


@dataclass(slots=True, eq=False)
class Engine:
    identity: bytes
    uid: int
    rank: RankId
    slot: Slot
    hello: Hello
    last_seen: float
    fleet_state: FleetState
    """What it last said or acknowledged to be in."""
    epoch: int
    """Of its weights, likewise."""
    state: PeerState = PeerState.NEW
    sent_garbage: bool = False
    requests: set[Request] = field(default_factory=set["Request"])
    owed: dict[int, Owed] = field(default_factory=dict[int, Owed])
    """sequence -> the control command that it has not answered"""
    report: Heartbeat | None = None
    steps: StepSums | None = None
    """What its process's steps held and took, as last reported."""
    max_requests: int | None = None
    """It may have; None: the usual number."""
    leaving: bool = False
    """It gets no more requests, finishes those that it has, and goes."""

    def __str__(self) -> str:
        return f"rank {self.rank}"


Peer = Client | Engine


class Request(Struct, eq=False):
    """One attempt of one request, from dispatch to its end."""

    client: Client
    engine: Engine
    request_id: int
    attempt: int
    decision: Decision
    holder: Holder
    external_digest: int | None = None
    state: RequestState = RequestState.NEW

    def __str__(self) -> str:
        return f"request {self.client.uid:x}/{self.request_id} attempt {self.attempt}"
