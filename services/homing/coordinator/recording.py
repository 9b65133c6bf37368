"""Recordings of a coordinator's routing: JSON lines, one for each thing done to its router.

    {"homing_routing": 1, "now": ..., "policy": ..., "alpha": ..., ...}        how it was set up
    ["route", hashes, prompt tokens, block size, now, [number, slot, ...]]     with what it chose
    ["end", number, generated tokens]   ["reported", slot, [...], now]   ...

Replaying one does the same things to a new router: it must come to the same choices.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from homing.coordinator.backlog import RankReport
from homing.coordinator.loads import Slot
from homing.coordinator.router import Decision, RankRouter, RoutingConfig
from homing.coordinator.step_model import StepSums
from homing.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1
MARK = "homing_routing"


class Recorder:
    """Writes a recording. What was done until a second ago outlives a kill."""

    def __init__(self, path: Path, config: RoutingConfig, *, now: float) -> None:
        """Raises `ConfigError` when the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"record {path}: {error.strerror}") from error
        self._write({MARK: VERSION, "now": now} | asdict(config))

    def record(self, entry: list[Any]) -> None:
        """Where the file takes no more, the recording ends; the coordinator goes on."""
        if self._file.closed:
            return
        try:
            self._write(entry)
            if entry[0] == "advance":
                self._file.flush()
        except OSError as error:
            log.error("the recording ends here", extra={"reason": str(error)})
            with suppress(OSError):
                self._file.close()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _write(self, entry: dict[str, Any] | list[Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")


class Comparison(NamedTuple):
    num_decisions: int
    num_same: int
    """Until the first that differs: after it the two have another history."""


def replay(lines: Iterable[str]) -> Comparison:
    """Do again what was recorded, and compare the choices. Raises `ConfigError` if it is none."""
    entries = [json.loads(line) for line in lines]
    pairs = enumerate(replayed_decisions(entries))
    num_decisions = sum(entry[0] == "route" for entry in entries[1:])
    num_same = next((n for n, (then, now) in pairs if then != now), num_decisions)
    return Comparison(num_decisions, num_same)


def replayed_decisions(entries: Sequence[Any]) -> Iterator[tuple[Decision, Decision]]:
    """Each decision as recorded, and as it is taken now."""
    setup: dict[str, Any] = dict(entries[0])
    if setup.pop(MARK, None) != VERSION:
        raise ConfigError(f"not a recording of version {VERSION}")
    now = setup.pop("now")
    router = RankRouter(RoutingConfig(**setup), now=now)
    decisions: dict[int, Decision] = {}
    for entry in entries[1:]:
        match entry:
            case ["route", hashes, num_prompt_tokens, block_size, now, recorded]:
                digests = None if hashes is None else bytes.fromhex(hashes)
                decision = router.route(digests, num_prompt_tokens, block_size, now)
                decisions[decision.number] = decision
                yield Decision(*recorded), decision
            case ["end", number, num_generated_tokens]:
                router.end(decisions.pop(number), num_generated_tokens)
            case ["reported", slot, [num_requests, owed_tokens, sums], now]:
                report = RankReport(num_requests, owed_tokens, StepSums(*sums))
                router.reported(Slot(slot), report, now)
            case ["advance", now]:
                router.advance(now)
            case ["limit", slot, max_requests]:
                router.limit(Slot(slot), max_requests)
            case ["stored", slot, hashes]:
                router.stored(Slot(slot), bytes.fromhex(hashes))
            case ["dropped", slot, hashes]:
                router.dropped(Slot(slot), bytes.fromhex(hashes))
            case ["clear"]:
                router.clear()
            case ["open_slot", _]:
                router.open_slot()
            case ["open" | "close" | "close_slot" as name, slot]:
                {"open": router.open, "close": router.close, "close_slot": router.close_slot}[name](
                    Slot(slot)
                )
            case _:
                raise ConfigError(f"a recording does not have {entry!r:.80}")
