"""docs/wire.md and the declarations say the same."""

from __future__ import annotations

import re
from pathlib import Path

from homing.wire import Message, pack
from tests.support.coordinator_fleet import Fleet
from tests.wire.test_golden_bytes import GOLDEN

MANUAL = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()


def _plain(cell: str) -> str:
    """Without what is in brackets."""
    return re.sub(r"\(.*?\)", "", cell)


def test_the_manual_has_every_message_with_its_tag_and_the_number_of_its_frames() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in MANUAL.splitlines()]
    told = {
        kind: (int(tag), len(frames and re.split("[;,]", _plain(frames))))
        for tag, kind, _, _, frames in (row for row in rows if len(row) == 5 and row[0].isdigit())
    }
    num_frames = {type(message).__name__: len(pack(message)) - 1 for message, *_ in GOLDEN}
    assert told == {
        message.__name__: (message.TAG, num_frames[message.__name__])
        for message in Message.__subclasses__()
    }


def test_the_manual_has_every_key_of_a_snapshot() -> None:
    fleet = Fleet()
    fleet.join_engine()
    snapshot = fleet.coordinator.snapshot(0.0)
    [rank] = snapshot["ranks"]
    section = MANUAL.partition("## What StatsReply says")[2].partition("\n## ")[0]
    table, _, row_of_rank = section.partition("A row of `ranks`")
    keys = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    assert sorted(keys) == sorted(snapshot)
    assert {*re.findall(r"`(\w+)`", row_of_rank)} >= rank.keys()
