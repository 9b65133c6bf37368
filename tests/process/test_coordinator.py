"""The coordinator as a process: real sockets, garbage, kills, stops and peers that do not read."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from homing.wire import (
    Abort,
    Command,
    Control,
    ControlDone,
    Fleet,
    Goodbye,
    Heartbeat,
    Lost,
    LostReason,
    Output,
    Rejoin,
    Role,
    Submit,
    Welcome,
    pack,
)
from tests.support.coordinator_fleet import client_hello, output, submit
from tests.support.coordinator_process import (
    TIMEOUT_S,
    CoordinatorProcess,
    Peer,
    coordinator_process,
    engine_process,
    peers,
)

CLIENT, ENGINE = Role.CLIENT, Role.ENGINE


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator_process(tmp_path) as running:
        yield running


def test_a_request_goes_to_the_engine_and_its_answer_comes_back(
    coordinator: CoordinatorProcess,
) -> None:
    with peers(coordinator.address, ENGINE, CLIENT) as (engine, client):
        client.say(submit(client.uid))
        received = engine.hear(Submit)
        assert received.prompt == submit(client.uid).prompt
        assert received.block_hashes is None
        answer = output((1, 0), client=client.uid)
        engine.say(answer)
        assert client.hear(Output) == answer
        client.wait_for_stats(requests=0, dispatched=1)


def test_a_large_prompt_arrives_whole(coordinator: CoordinatorProcess) -> None:
    prompt = os.urandom(4 * 4096) * 32
    with peers(coordinator.address, ENGINE, CLIENT) as (engine, client):
        client.say(submit(client.uid, prompt=prompt, hashed=False))
        assert bytes(engine.hear(Submit).prompt or b"") == prompt


def test_clients_may_come_before_engines(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, CLIENT, ENGINE) as (client, _):
        assert client.hear(Fleet).live_ranks == 1


def test_the_coordinator_shows_that_it_is_alive(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, ENGINE, CLIENT) as both:
        for peer in both:
            peer.hear(Heartbeat)


def test_garbage_before_and_after_hello_disturbs_nobody(coordinator: CoordinatorProcess) -> None:
    host, port = coordinator.address.removeprefix("tcp://").split(":")
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5000,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
    ):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw:
            raw.sendall(noise)
    with peers(coordinator.address, ENGINE, CLIENT) as (engine, client):
        stranger = Peer(coordinator.address, CLIENT)
        garbage = [[b""], [b"\xff" * 600], [b"", b"", b""], [b"\xc0"], pack(submit())[:-1]]
        for sender in (stranger, engine, client):
            for frames in garbage:
                sender.dealer.send(frames)
        client.wait_for_stats(garbage=3 * len(garbage))
        client.say(submit(client.uid))
        engine.hear(Submit)
        stranger.join()
        stranger.dealer.close()
    assert coordinator.log.read_text().count("dropped garbage") == 3, "one line a sender"


def test_a_stranger_is_told_to_rejoin_and_then_served(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, ENGINE) as [engine]:
        stranger = Peer(coordinator.address, CLIENT)
        stranger.say(submit(stranger.uid))
        stranger.hear(Rejoin)
        stranger.join()
        stranger.say(submit(stranger.uid))
        engine.hear(Submit)
        stranger.dealer.close()


def test_a_killed_engine_is_noticed_at_once(coordinator: CoordinatorProcess) -> None:
    """Its connection breaks: nobody waits for the ten seconds of the heartbeat timeout."""
    with (
        peers(coordinator.address, CLIENT) as [client],
        engine_process(coordinator.address, 0) as engine,
    ):
        client.hear(Fleet, live_ranks=1)
        client.say(submit(client.uid))
        client.wait_for_stats(requests=1)
        engine.kill()
        killed_at = time.monotonic()
        assert client.hear(Lost).reason is LostReason.RANK_LOST
        assert time.monotonic() - killed_at < 8.0
        assert client.hear(Fleet, live_ranks=0)
        client.wait_for_stats(requests=0, lost_ranks=1)


def test_an_engine_that_hangs_is_lost_and_may_come_back(tmp_path: Path) -> None:
    with (
        coordinator_process(tmp_path, "--heartbeat-timeout-s", "2") as coordinator,
        peers(coordinator.address, CLIENT) as [client],
        engine_process(coordinator.address, 0) as engine,
    ):
        client.hear(Fleet, live_ranks=1)
        client.say(submit(client.uid))
        client.wait_for_stats(requests=1)
        engine.suspend()
        assert client.hear(Lost).reason is LostReason.RANK_LOST
        client.hear(Fleet, live_ranks=0)
        engine.resume()
        client.hear(Fleet, live_ranks=1)


def test_nothing_is_lost_while_the_coordinator_is_stopped(tmp_path: Path) -> None:
    """A stop of more than the heartbeat timeout, with 5,000 submissions meanwhile."""
    with (
        coordinator_process(
            tmp_path, "--heartbeat-timeout-s", "1", "--max-queued-requests", "10000"
        ) as coordinator,
        peers(coordinator.address, ENGINE, CLIENT) as (engine, client),
    ):
        coordinator.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        for request_id in range(5000):
            client.say(submit(client.uid, request_id))
        while time.monotonic() < stopped_at + 2.0:
            client.say(Heartbeat(0))
            engine.say(Heartbeat(0))
            time.sleep(0.05)
        coordinator.signal(signal.SIGCONT)
        seen = {engine.hear(Submit).request_id for _ in range(5000)}
        assert seen == set(range(5000))
        stats = client.wait_for_stats(dispatched=5000)
        assert (stats["lost_ranks"], stats["lost_clients"]) == (0, 0)


def test_requests_of_a_client_that_vanishes_are_aborted(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, ENGINE) as [engine]:
        client = Peer(coordinator.address, CLIENT)
        client.join()
        client.say(submit(client.uid))
        engine.hear(Submit)
        client.dealer.close()
        assert engine.hear(Abort) == Abort(client.uid, 1, 0)


def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(tmp_path: Path) -> None:
    """It takes one message and no more; its outputs would fill the coordinator's memory."""
    with (
        coordinator_process(tmp_path, "--send-queue", "20") as coordinator,
        peers(coordinator.address, ENGINE, CLIENT) as (engine, client),
    ):
        deaf = zmq.Context.instance().socket(zmq.DEALER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.IDENTITY, b"c-deaf")
        deaf.connect(coordinator.address)
        deaf.send_multipart(pack(client_hello(4711)))
        deaf.send_multipart(pack(submit(4711)))
        engine.hear(Submit)
        step = Output(4711, 1, 0, None, bytes(2**20))
        deadline = time.monotonic() + TIMEOUT_S
        while not client.stats()["lost_clients"]:
            assert time.monotonic() < deadline
            engine.say(step)
        assert engine.hear(Abort) == Abort(4711, 1, 0)
        client.say(submit(client.uid, 2))
        engine.hear(Submit)
        engine.say(output((2, 0), client=client.uid))
        client.hear(Output)
        deaf.close()


def test_pause_is_acknowledged_by_every_rank(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, ENGINE, ENGINE, CLIENT) as (first, second, client):
        client.say(Control(Command.PAUSE, 5))
        for engine in (first, second):
            sequence = engine.hear(Control).sequence
            engine.say(ControlDone(Command.PAUSE, sequence, True))
        assert client.hear(ControlDone).sequence == 5
        assert client.stats()["state"] == "paused"


def test_everybody_rejoins_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    with coordinator_process(tmp_path) as coordinator:
        address = coordinator.address
        with peers(address, ENGINE, CLIENT) as (engine, client):
            coordinator.process.kill()
            coordinator.process.wait()
            with coordinator_process(tmp_path, "--bind", address) as second:
                assert second.address == address
                for peer in (engine, client):
                    peer.hear(Rejoin)
                    assert isinstance(peer.join(), Welcome)
                client.say(submit(client.uid))
                engine.hear(Submit)


def test_a_goodbye_is_heeded(coordinator: CoordinatorProcess) -> None:
    with peers(coordinator.address, ENGINE, CLIENT) as (engine, client):
        engine.say(Goodbye())
        client.hear(Fleet, live_ranks=0)
        assert client.stats()["lost_ranks"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with coordinator_process(tmp_path) as coordinator:
        coordinator.signal(number)
        assert coordinator.process.wait(TIMEOUT_S) == 0
    assert "Traceback" not in coordinator.log.read_text()


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "homing.coordinator", "--lifeline-fd", str(read_fd)],
        pass_fds=[read_fd],
        stderr=subprocess.DEVNULL,
    )
    os.close(read_fd)
    os.close(write_fd)
    assert process.wait(TIMEOUT_S) is not None


def test_a_taken_address_is_one_line_and_a_failure(coordinator: CoordinatorProcess) -> None:
    command = [sys.executable, "-m", "homing.coordinator", "--bind", coordinator.address]
    second = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert second.returncode == 2
    [line] = second.stderr.splitlines()
    assert re.search(r"cannot bind tcp://127\.0\.0\.1:\d+", line)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--bind", "tcp://0.0.0.0:0"], "not authenticated"),
        (["--bind", "tcp://0.0.0.0:0", "--keys", "/nowhere"], "cannot read keys from /nowhere"),
        (["--policy", "best"], "policy"),
        (["--alpha", "-1"], "alpha"),
        (["--heartbeat-s", "5", "--heartbeat-timeout-s", "6"], "heartbeat_timeout_s"),
        (["--max-queued-requests", "0"], "max_queued_requests"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "homing.coordinator", *flags]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert complaint in process.stderr
    assert "Traceback" not in process.stderr
