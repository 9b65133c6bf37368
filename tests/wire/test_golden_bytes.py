"""The bytes of every message, pinned: a change here is a change of protocol version."""

from __future__ import annotations

import pytest

from homing.wire import (
    PROTOCOL_VERSION,
    Abort,
    AbortMatched,
    AbortMatching,
    Command,
    Control,
    ControlDone,
    Drain,
    Drained,
    Fleet,
    FleetState,
    Goodbye,
    Heartbeat,
    Hello,
    KvEvents,
    Lost,
    LostReason,
    Message,
    Output,
    Refused,
    Rejoin,
    Role,
    Stats,
    StatsReply,
    Submit,
    Welcome,
    pack,
    parse,
)

GOLDEN: list[tuple[Message, str, list[bytes]]] = [
    (
        Hello(PROTOCOL_VERSION, Role.ENGINE, 258, 1, 3, FleetState.PAUSED, 2, 9, b"card", b"w"),
        "990102a6656e67696e65cd01020103a67061757365640209",
        [b"card", b"w"],
    ),
    (
        Welcome(1, 2, None, FleetState.RUNNING, 0, 0, "round_robin", False, 2, 0.5, None, b"r"),
        "9b020102c0a772756e6e696e670000ab726f756e645f726f62696ec202cb3fe0000000000000",
        [b"\xc0", b"r"],
    ),
    (Refused("no"), "9203a26e6f", []),
    (Rejoin(5), "920405", []),
    (
        Fleet(1, FleetState.PAUSED, 0, "load_balanced", False, 3, b"c", None),
        "970501a670617573656400ad6c6f61645f62616c616e636564c203",
        [b"c", b"\xc0"],
    ),
    (
        Submit(
            2**63 - 1, 2, 0, 16, 4, 64, "s", 9, -1, 2.0, 7, (8, 9, 1), b"prompt", b"sampling", b""
        ),
        "9d06cf7fffffffffffffff0200100440a17309ffcb40000000000000000793080901",
        [b"prompt", b"sampling", b""],
    ),
    (Output(7, 2, 1, b"f", b"d"), "9407070201", [b"f", b"d"]),
    (Abort(7, 2, 1), "9408070201", []),
    (
        Lost(2, 1, LostReason.RANK_LOST, 0.0, ""),
        "96090201a972616e6b5f6c6f7374cb0000000000000000a0",
        [],
    ),
    (Control(Command.PAUSE, 3, None), "930aa5706175736503", [b"\xc0"]),
    (ControlDone(Command.PAUSE, 3, True, "", b"r"), "950ba5706175736503c3a0", [b"r"]),
    (
        Heartbeat(0, 1, 2, 3, 4, 5, FleetState.RUNNING, 0, None),
        "990c000102030405a772756e6e696e6700",
        [b"\xc0"],
    ),
    (Stats(4), "920d04", []),
    (StatsReply(4, b"snap"), "920e04", [b"snap"]),
    (Goodbye(), "920fc2", []),
    (AbortMatching(3, None), "931003c0", []),
    (AbortMatched(3, 5), "93110305", []),
    (Drain(3, 1, 0.5), "94120301cb3fe0000000000000", []),
    (Drained(3, False, "no"), "941303c2a26e6f", []),
    (KvEvents(2, 1, b"s", b"d"), "93140201", [b"s", b"d"]),
]


@pytest.mark.parametrize(
    ("message", "metadata", "frames"), GOLDEN, ids=lambda v: type(v).__name__[:12]
)
def test_the_layout_of_a_message_is_pinned(message, metadata, frames):
    packed = pack(message)
    assert bytes(packed[0]).hex() == metadata
    assert packed[1:] == frames
    assert parse(packed) == message


def test_every_message_is_pinned():
    assert {type(message) for message, _, _ in GOLDEN} == set(Message.__subclasses__())
