"""What the coordinator has counted since it started. Nothing here ever falls."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from itertools import islice

from homing.coordinator.backlog import RankReport
from homing.coordinator.step_model import StepSums
from homing.wire import Heartbeat, Payload, read_payload

MAX_COUNTERS = 256
MAX_COUNTER_NAME = 64
MAX_COUNT = 2**53
"""What a process may claim to have counted; sums of that many still fit the wire's integers."""
MAX_RETIRED = 1024
"""Processes whose last counters are kept apart, in case they come back."""

MAX_SUM = 2**63

Counters = dict[str, int | float]


@dataclass(slots=True)
class Totals:
    submitted: int = 0
    """Submissions of known clients, refused ones included, duplicates not."""
    resubmissions: int = 0
    """Of those, how many were a second or later attempt."""
    duplicates: int = 0
    """Submissions of an attempt that is alive, or older than it: ignored."""
    superseded: int = 0
    lost_requests: int = 0
    """Attempts that ended with their engine."""
    orphaned_requests: int = 0
    """Attempts that ended with their client."""
    stale_finishes: int = 0
    """Ends that engines told of requests they do not have."""
    outputs: int = 0
    outputs_dropped: int = 0
    """For clients that are not there."""
    lost_ranks: int = 0
    lost_clients: int = 0
    garbage: int = 0
    predicted_cached_tokens: int = 0
    """Of finished requests: prompt tokens that the index said their rank held."""
    actual_cached_tokens: int = 0
    """Of the same requests: prompt tokens that their engine found cached."""
    mispredicted_cached_tokens: int = 0
    """Sum of the differences of the two, request by request, whichever is more."""
    kv_stored: int = 0
    """Block hashes that engines said they hold, in KvEvents."""
    kv_dropped: int = 0
    """Block hashes that engines said they hold no more."""
    generated_tokens: int = 0
    # No Counter: to write an item of one takes several times as long.
    dispatched_to_rank: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    refused: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By reason."""
    finished: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By reason."""


def read_counters(frame: Payload) -> Counters:
    """A process's counters. Raises `WireError` if they are not a map of names to numbers.

    Odd entries are left out: too many, too long a name, negative, not finite or absurdly large.
    """
    told = read_payload(frame or b"\x80", dict[str, int | float])
    fit = {
        name: value
        for name, value in told.items()
        if len(name) <= MAX_COUNTER_NAME and 0 <= value <= MAX_COUNT
    }
    return dict(islice(fit.items(), MAX_COUNTERS))


def read_report(report: Heartbeat, counters: Counters) -> RankReport:
    """What an engine's heartbeat tells the router. A counter that it does not keep counts as 0."""
    sums = StepSums(
        num_steps=int(counters.get("steps", 0)),
        prefill_tokens=int(counters.get("prefilled_tokens", 0)),
        prefill_pairs=int(counters.get("prefilled_pairs", 0)),
        decode_rows=int(counters.get("decode_rows", 0)),
        decode_context=int(counters.get("decode_context_tokens", 0)),
        seconds=counters.get("prefill_step_s", 0.0) + counters.get("decode_step_s", 0.0),
    )
    return RankReport(report.running + report.waiting, report.owed_tokens, sums)


class ReportedCounters:
    """Fleet totals of what engines and clients count, which restarts at zero with each process.

    A total is the sum over all processes that ever were. A process that rejoins goes on where it
    was; one that is gone keeps what it last said.
    """

    def __init__(self) -> None:
        self._live: dict[int, Counters] = {}  # uid -> counters
        self._retired: OrderedDict[int, Counters] = OrderedDict()
        self._settled: Counters = {}  # sum over those retired long ago

    def join(self, uid: int) -> None:
        self._live[uid] = self._retired.pop(uid, {})

    def update(self, uid: int, counters: Counters) -> None:
        """Take over what a process says; a value that fell is not believed."""
        known = self._live[uid]
        for name, value in counters.items():
            if value > known.get(name, -1) and (name in known or len(known) < MAX_COUNTERS):
                known[name] = value

    def leave(self, uid: int) -> None:
        self._retired[uid] = self._live.pop(uid)
        if len(self._retired) > MAX_RETIRED:
            _, counters = self._retired.popitem(last=False)
            _add(self._settled, counters)

    def of(self, uid: int) -> Counters:
        return self._live.get(uid) or self._retired.get(uid) or {}

    def totals(self) -> Counters:
        sums = dict(self._settled)
        for counters in (*self._live.values(), *self._retired.values()):
            _add(sums, counters)
        return sums


def _add(sums: Counters, counters: Counters) -> None:
    for name, value in counters.items():
        if name in sums or len(sums) < MAX_COUNTERS:
            sums[name] = min(sums.get(name, 0) + value, MAX_SUM)
