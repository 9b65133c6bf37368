"""Every message, declared once: metadata fields first, then payload frames, both in wire order.

A message travels as ZMQ multipart `[metadata, frame, frame, ...]`. The metadata is a msgpack
array `[tag, field, ...]`; its size does not depend on the prompt. A field annotated `Frame` is a
payload frame: opaque to the coordinator unless its docstring says *read*. An absent frame is
`None` here and a nil frame on the wire, which is not the same as an empty one. `codec` derives
the bytes from these classes.

To add a field: last among the metadata, with a default. To change anything else: raise
`PROTOCOL_VERSION`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from typing_extensions import Buffer

from homing.wire.commands import Command, FleetState

PROTOCOL_VERSION = 2


class FrameMark:
    """Marks a field as a payload frame."""


Frame = Annotated[Buffer | None, FrameMark()]

Uint = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=64)]
"""A short identifier, such as a policy's name."""
Text = Annotated[str, Meta(max_length=100)]
"""A sentence for a person. `clip` cuts a longer one: 100 characters are at most 400 bytes."""


def clip(text: str) -> str:
    """`text` cut to what a `Text` field holds."""
    return text if len(text) <= 100 else text[:99] + "…"


def request_name(client: int, request_id: int) -> str:
    """What a request is called in the logs of every process."""
    return f"{client:x}/{request_id}"


class Role(StrEnum):
    """What a peer of the coordinator is."""

    ENGINE = "engine"
    CLIENT = "client"


class LostReason(StrEnum):
    """Why no engine will answer an attempt."""

    RANK_LOST = "rank_lost"  # the engine died or hung, perhaps of this: submit again, a few times
    RANK_LEFT = "rank_left"  # the engine went on purpose: submit again with what was received
    NO_RANK = "no_rank"  # no engine is there to take it
    ABORTED = "aborted"  # it was being aborted when its engine was lost: it ends as aborted
    OVERLOADED = "overloaded"  # a bounded queue is full: retry later
    INVALID = "invalid"  # the submission cannot be served: do not retry


class Message(Struct, frozen=True, gc=False):
    """Base of all messages; each subclass has a tag, its kind on the wire."""

    TAG: ClassVar[int]


class Hello(Message, frozen=True):
    """Peer -> coordinator: the first message, and again after each Rejoin."""

    TAG: ClassVar[int] = 1
    protocol_version: Uint
    role: Role
    uid: Uint
    """Random, drawn once per process. A client's uid is its client id in every later message."""
    incarnation: Uint
    """How many sessions this process opened before; 0 for the first."""
    rank: Uint | None = None
    """Engines: the rank to be; None takes the lowest free one."""
    state: FleetState = FleetState.RUNNING
    epoch: Uint = 0
    control_sequence: Uint = 0
    """Engines: the last control command carried out."""
    model_card: Frame = None
    """Read. Engines: a `ModelCard`."""
    weights: Frame = None
    """Read. Engines: the `UpdateWeights` by which another would get the weights of `epoch`; None
    when there is none."""


class Welcome(Message, frozen=True):
    """Coordinator -> peer: the Hello is accepted; what to know of the fleet."""

    TAG: ClassVar[int] = 2
    protocol_version: Uint
    incarnation: Uint
    """The coordinator's own, random per process: another number means it was restarted."""
    rank: Uint | None
    """Engines: the rank they are now."""
    state: FleetState
    epoch: Uint
    control_sequence: Uint
    policy: Name
    reads_prefixes: bool
    """False: block hashes are not looked at, do not compute them."""
    live_ranks: Uint
    heartbeat_s: float
    """How often each side shows that it is alive."""
    model_card: Frame = None
    """Clients: the card of the first engine that joined; None before one did."""
    ranks: Frame = None
    """Clients: a list of `RankInfo`."""


class Refused(Message, frozen=True):
    """Coordinator -> peer: the Hello is not accepted, and repeating it will not help."""

    TAG: ClassVar[int] = 3
    reason: Text


class Rejoin(Message, frozen=True):
    """Coordinator -> a sender it does not know: drop all work, then say Hello again."""

    TAG: ClassVar[int] = 4
    incarnation: Uint


class Fleet(Message, frozen=True):
    """Coordinator -> clients: the fleet changed."""

    TAG: ClassVar[int] = 5
    sequence: Uint
    state: FleetState
    epoch: Uint
    policy: Name
    reads_prefixes: bool
    live_ranks: Uint
    model_card: Frame = None
    """None when unchanged."""
    ranks: Frame = None
    """A list of `RankInfo`."""


class Submit(Message, frozen=True):
    """Client -> coordinator -> engine: generate. Forwarded with its metadata untouched."""

    TAG: ClassVar[int] = 6
    client: Uint
    """The sender's uid."""
    request_id: Uint
    """Counted by the client; (client, request_id) is unique in the fleet."""
    attempt: Uint
    """0 first; raised by one at each resubmission. Answers to another attempt are ignored."""
    num_prompt_tokens: Uint
    """Tokens of the prompt, those of `num_resumed_tokens` included."""
    num_resumed_tokens: Uint
    """How many of its last tokens an earlier attempt generated."""
    max_new_tokens: Uint
    """Most tokens to generate in this attempt: what the request may cost."""
    cache_salt: Name = ""
    """Keeps the prefix cache of one tenant apart; part of the hashes."""
    external_digest: Uint | None = None
    """Of the name that the request has outside; None: it has none. Need not be unique."""
    priority: Priority = 0
    """Lower is sooner: engines run it before, and in place of, requests of a higher number."""
    deadline_s: float | None = None
    """Seconds that it has left; then it ends as aborted, with what was generated. None: no end."""
    tenant: Uint | None = None
    """Of those that share the client, whose it is: while places are short each has a fair share.
    None: the client's own."""
    lent_at: tuple[Uint, Uint, Uint] | None = None
    """Where a prompt lies that is lent, not sent: process id, descriptor, number of the loan."""
    prompt: Frame = None
    """Token ids, little-endian uint32. None: it is lent."""
    sampling: Frame = None
    """`SamplingParams`."""
    block_hashes: Frame = None
    """Read, and not forwarded: the digests at the routing points, joined. None: not hashed, route
    by load. Empty: hashed, and shorter than one block."""


class Output(Message, frozen=True):
    """Engine -> coordinator -> client: what one step brought for all of one client's requests."""

    TAG: ClassVar[int] = 7
    client: Uint
    num_deltas: Uint
    num_finished: Uint
    finished: Frame = None
    """Read: a list of `FinishedRequest`; None when none finished."""
    deltas: Frame = None
    """A list of `Delta`."""


class Abort(Message, frozen=True):
    """Client -> coordinator -> engine: end a request now. Answered by its last Output."""

    TAG: ClassVar[int] = 8
    client: Uint
    request_id: Uint
    attempt: Uint


class Lost(Message, frozen=True):
    """Coordinator -> client: no engine will answer this attempt."""

    TAG: ClassVar[int] = 9
    request_id: Uint
    attempt: Uint
    reason: LostReason
    retry_after_s: float = 0.0
    detail: Text = ""


class Control(Message, frozen=True):
    """Client -> coordinator -> every engine: a command to the whole fleet."""

    TAG: ClassVar[int] = 10
    command: Command
    sequence: Uint
    """From a client: its own count. To an engine: the fleet's, one for each command."""
    arguments: Frame = None
    """Read: a msgpack map."""


class ControlDone(Message, frozen=True):
    """Engine -> coordinator, then coordinator -> client when every live rank has answered."""

    TAG: ClassVar[int] = 11
    command: Command
    sequence: Uint
    ok: bool
    detail: Text = ""
    results: Frame = None
    """Read: to a client, a msgpack map of rank -> result map."""


class Heartbeat(Message, frozen=True):
    """Either way, each `Welcome.heartbeat_s`: the sender is alive."""

    TAG: ClassVar[int] = 12
    incarnation: Uint
    """The sender's own session."""
    running: Uint = 0
    """Engines: requests in the batch."""
    waiting: Uint = 0
    """Engines: requests not yet in it."""
    owed_tokens: Uint = 0
    """Engines: prompt tokens yet to prefill."""
    kv_used_blocks: Uint = 0
    kv_total_blocks: Uint = 0
    state: FleetState = FleetState.RUNNING
    epoch: Uint = 0
    counters: Frame = None
    """Read: a msgpack map of counter name -> value since the process started. Their sums over all
    processes are in StatsReply."""


class Stats(Message, frozen=True):
    """Client -> coordinator: send a snapshot."""

    TAG: ClassVar[int] = 13
    token: Uint
    """Comes back in the reply."""


class StatsReply(Message, frozen=True):
    """Coordinator -> client: the fleet as the coordinator sees it now."""

    TAG: ClassVar[int] = 14
    token: Uint
    snapshot: Frame = None
    """A msgpack map; docs/wire.md lists its keys."""


class Goodbye(Message, frozen=True):
    """Peer -> coordinator: leaving. A client's requests are aborted."""

    TAG: ClassVar[int] = 15
    failed: bool = False
    """Engines: not on purpose but for an error, which what it was working on may have caused."""


class AbortMatching(Message, frozen=True):
    """Client -> coordinator: abort requests, whichever client's they are. Each is answered, to its
    own client, by its last Output."""

    TAG: ClassVar[int] = 16
    token: Uint
    """Comes back in the reply."""
    external_digest: Uint | None
    """Of those to abort; None: all."""


class AbortMatched(Message, frozen=True):
    """Coordinator -> client: the engines were told."""

    TAG: ClassVar[int] = 17
    token: Uint
    num_requests: Uint
    """How many there were, those included that were being aborted already."""


class Drain(Message, frozen=True):
    """Let a rank finish and go: it gets no more requests, finishes those that it has for a bounded
    time, and leaves; what is unfinished then goes on elsewhere.

    Client -> coordinator: this rank. Engine -> coordinator: itself. Coordinator -> engine: begin;
    no request follows."""

    TAG: ClassVar[int] = 18
    token: Uint
    """Comes back in the reply to a client."""
    rank: Uint | None
    """From a client; nobody else names one."""
    timeout_s: float
    """How long it may go on working."""


class Drained(Message, frozen=True):
    """Coordinator -> client: the rank is gone, or cannot be drained."""

    TAG: ClassVar[int] = 19
    token: Uint
    ok: bool
    detail: Text = ""


class KvEvents(Message, frozen=True):
    """Engine -> coordinator, after a heartbeat and only if asked for: which prefixes the rank has
    come to hold, and which it holds no more. Stored ones come first: one that is dropped, too, was
    stored before."""

    TAG: ClassVar[int] = 20
    num_stored: Uint
    """Sequences in `stored`."""
    num_dropped: Uint
    """Digests in `dropped`."""
    stored: Frame = None
    """Read: a list, of each sequence the digests at its routing points, from the first on, joined;
    None when there is none."""
    dropped: Frame = None
    """Read: digests, joined; None when there is none."""


ToCoordinator = (
    Hello
    | Submit
    | Output
    | Abort
    | AbortMatching
    | Control
    | ControlDone
    | Heartbeat
    | KvEvents
    | Stats
    | Drain
    | Goodbye
)
ToEngine = Welcome | Refused | Rejoin | Submit | Abort | Control | Drain | Heartbeat
ToClient = (
    Welcome
    | Refused
    | Rejoin
    | Fleet
    | Output
    | Lost
    | AbortMatched
    | ControlDone
    | Heartbeat
    | StatsReply
    | Drained
)
