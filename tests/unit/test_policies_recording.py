"""A recording of a live coordinator replays to the same decisions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from homing.bench.replay.traces import is_recording, lines_of, load_trace
from homing.bench.route import main
from homing.coordinator import recording
from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.recording import Recorder
from homing.coordinator.routing import POLICY_NAMES
from homing.coordinator.server import Server
from homing.coordinator.state import Coordinator
from homing.errors import ConfigError
from homing.prefix import routing_hashes
from homing.wire import Heartbeat, KvEvents, pack_payload
from tests.support.coordinator_fleet import BLOCK_SIZE, Fleet, output, submit, tokens


class Recorded:
    """A fleet that is recorded, and a random life for it."""

    def __init__(self, path: Path, policy: str, **settings: object) -> None:
        self.path = path
        self.fleet = Fleet(policy=policy, prefix_ttl_s=30.0, **settings)
        routing = self.fleet.config.routing
        self.recorder = Recorder(path, routing, now=0.0)
        self.fleet.coordinator = Coordinator(
            self.fleet.config, incarnation=7, now=0.0, record=self.recorder.record
        )
        self.random = random.Random(11)
        self.next_id = 0
        self.alive: dict[int, bytes] = {}
        self.steps = [0] * 4

    def live(self, num_events: int) -> None:
        self.fleet.join_client(1)
        for rank in range(4):
            self.fleet.join_engine(rank)
        events = [self.submit] * 6 + [self.finish] * 5 + [self.beat] * 3
        events += [self.tick, self.restart, self.correct]
        for _ in range(num_events):
            self.random.choice(events)()
        self.recorder.close()

    def submit(self) -> None:
        """Prompts with many common prefixes; some are not hashed."""
        self.next_id += 1
        words = [self.random.randint(1, 3)] * self.random.randint(1, 300)
        words += [self.random.randint(10, 60)] * self.random.randint(0, 40)
        hashed = self.random.random() < 0.9
        message = submit(request_id=self.next_id, prompt=tokens(*words), hashed=hashed)
        for peer, _ in self.fleet.say(b"c1", message):
            if peer != b"c1":
                self.alive[self.next_id] = peer

    def finish(self) -> None:
        if self.alive:
            request_id = self.random.choice(list(self.alive))
            self.fleet.say(self.alive.pop(request_id), output((request_id, 0)))

    def beat(self) -> None:
        rank = self.random.randrange(4)
        self.steps[rank] += self.random.randint(0, 50)
        counters = {
            "steps": self.steps[rank],
            "prefilled_tokens": 100 * self.steps[rank],
            "prefill_step_s": 0.03 * self.steps[rank],
        }
        beat = Heartbeat(
            0,
            running=self.random.randint(0, 3),
            owed_tokens=self.random.randint(0, 500),
            counters=pack_payload(counters),
        )
        self.fleet.say(b"e%d" % rank, beat)

    def correct(self) -> None:
        """A rank lost the one kind of prompts, and holds the other."""
        stored, dropped = (routing_hashes(tokens(*[kind] * 300), BLOCK_SIZE) for kind in (1, 2))
        events = KvEvents(1, len(dropped) // 16, pack_payload([stored]), dropped)
        self.fleet.say(b"e%d" % self.random.randrange(4), events)

    def tick(self) -> None:
        self.fleet.tick(self.random.choice([0.1, 0.5, 4.0]))

    def restart(self) -> None:
        rank = self.random.randrange(4)
        self.fleet.join_engine(rank, incarnation=self.next_id)
        self.alive = {i: peer for i, peer in self.alive.items() if peer != b"e%d" % rank}


@pytest.mark.parametrize("load", ["requests", "tokens"])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_recording_replays_to_the_same_decisions(tmp_path: Path, policy: str, load: str) -> None:
    recorded = Recorded(tmp_path / "decisions.jsonl", policy, routing_load=load)
    recorded.live(600)
    compared = recording.replay(lines_of(recorded.path))
    assert compared.num_decisions > 150
    assert compared.num_same == compared.num_decisions


def test_another_alpha_decides_otherwise(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    recorded = Recorded(tmp_path / "decisions.jsonl", "prefix_affinity", alpha=0.5)
    recorded.live(600)
    setup, *entries = lines_of(recorded.path)
    changed = json.dumps(json.loads(setup) | {"alpha": 4.0})
    compared = recording.replay([changed, *entries])
    assert compared.num_same < compared.num_decisions


def test_the_bench_compares_a_recording_and_replays_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(tmp_path / "decisions.jsonl", "prefix_affinity")
    recorded.live(400)
    workload = load_trace(recorded.path, "recorded")
    assert is_recording(recorded.path)
    assert main(["--trace", str(recorded.path), "--ranks", "2", "--policies", "work"]) == 0
    report = json.loads(capsys.readouterr().out)
    [comparison] = report["recordings"]
    [result] = report["results"]
    assert comparison["num_same"] == comparison["num_decisions"] == workload.num_requests
    assert result["requests"] == workload.num_requests
    assert result["hit_rate"] > 0.3, "prefixes are as common as they were"


def test_the_coordinator_process_records_where_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    server = Server(CoordinatorConfig(bind=f"ipc://{tmp_path}/socket", alpha=0.25, record=path))
    server.close()
    assert json.loads(next(lines_of(path)))["alpha"] == 0.25
    assert recording.replay(lines_of(path)) == (0, 0)


def test_what_is_no_recording_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a recording"):
        recording.replay(['{"timestamp": 0}'])


def test_a_file_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path) -> None:
    config = Fleet().config.routing
    with pytest.raises(ConfigError, match=r"record .*: No such file or directory"):
        Recorder(tmp_path / "absent" / "file", config, now=0.0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_recording_and_not_the_coordinator() -> None:
    recorded = Recorded(Path("/dev/full"), "prefix_affinity")
    recorded.live(200)
    assert recorded.fleet.stats()["dispatched"] > 0
