"""The commands that look at a fleet or change it: top, drain, keygen."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homing.cli.__main__ import main
from homing.cli.fleet_table import Sample, fleet_view
from homing.wire import Drain, Goodbye, Role
from tests.support.coordinator_process import (
    CoordinatorProcess,
    Peer,
    coordinator_process,
    peers,
)


def rank(number: int, generated: int, **fields: Any) -> dict[str, Any]:
    row = {"rank": number, "live": True, "state": "running", "load": 3, "running": 2, "waiting": 1}
    row |= {"kv_used_blocks": 5, "kv_total_blocks": 20}
    counters = {"prompt_tokens": 100, "cached_tokens": 25, "generated_tokens": generated}
    return row | {"counters": counters} | fields


def fleet(*ranks: dict[str, Any]) -> dict[str, Any]:
    head = {"state": "running", "epoch": 4, "policy": "work", "live_ranks": 1, "clients": 2}
    return head | {"requests": 6, "ranks": list(ranks)}


def printed(sample: Sample, earlier: Sample | None) -> list[str]:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(fleet_view(sample, earlier))
    return capture.get().splitlines()


def test_two_samples_tell_how_fast_each_rank_is():
    first = Sample(10.0, fleet(rank(0, 50), rank(1, 0, live=False)))
    lines = printed(Sample(12.0, fleet(rank(0, 170), rank(1, 0, live=False))), first)
    assert lines[0] == "running, epoch 4, work: 1 of 2 ranks, 2 clients, 6 requests, 60.0 tokens/s"
    assert lines[3].split() == ["0", "running", "3", "2", "1", "██░░░░░░░░", "25%", "25%", "60.0"]
    assert lines[4].split()[1] == "gone"


def test_a_restarted_rank_and_the_first_sample_have_no_pace():
    now = Sample(12.0, fleet(rank(0, 5)))
    assert [row.tokens_s for row in now.rows(None)] == [0.0]
    assert [row.tokens_s for row in now.rows(Sample(10.0, fleet(rank(0, 900))))] == [0.0]
    assert [row.tokens_s for row in now.rows(Sample(10.0, fleet()))] == [0.0]


@pytest.mark.parametrize(
    ("fields", "state"),
    [({"leaving": True}, "leaving"), ({"circuit": "half open"}, "running, breaker half open")],
)
def test_a_rank_that_gets_less_work_says_why(fields: dict[str, Any], state: str):
    assert Sample(0.0, fleet(rank(0, 1, **fields))).rows(None)[0].state == state


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator_process(tmp_path) as running:
        yield running


def test_top_reads_a_coordinator(
    coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
):
    with peers(coordinator.address, Role.ENGINE):
        words = ["--coordinator", coordinator.address, "--once", "--interval-s", "0.05"]
        assert main(["top", *words]) == 0
    assert "1 of 1 ranks" in capsys.readouterr().out


def test_top_reads_a_server(capsys: pytest.CaptureFixture[str]):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert (self.path, self.headers["Authorization"]) == ("/fleet", "Bearer secret")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(fleet(rank(0, 7))).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        words = ["--url", url, "--api-key", "secret", "--once", "--interval-s", "0.05"]
        assert main(["top", *words]) == 0
        server.shutdown()
        thread.join()
    assert "epoch 4" in capsys.readouterr().out


def test_top_says_in_one_line_that_nobody_is_there(capsys: pytest.CaptureFixture[str]):
    assert main(["top", "--url", "http://127.0.0.1:1", "--once"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot read http://127.0.0.1:1/fleet" in line


def test_drain_waits_until_the_rank_has_left(
    coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
):
    with peers(coordinator.address, Role.ENGINE) as [engine]:
        leaving = threading.Thread(target=leave_when_told, args=[engine])
        leaving.start()
        assert main(["drain", "0", "--coordinator", coordinator.address, "--timeout-s", "7"]) == 0
        leaving.join()
    assert capsys.readouterr().out == "rank 0 has left\n"


def leave_when_told(engine: Peer) -> None:
    assert engine.hear(Drain).timeout_s == 7.0
    engine.say(Goodbye())


def test_drain_says_in_one_line_that_there_is_no_such_rank(
    coordinator: CoordinatorProcess, capsys: pytest.CaptureFixture[str]
):
    assert main(["drain", "5", "--coordinator", coordinator.address]) == 1
    assert "there is no rank 5" in capsys.readouterr().err


def test_keygen_writes_a_file_for_each_role_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == ["coordinator.key", "engine.key", "client.key"]
    assert main(["keygen", str(tmp_path / "keys")]) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_top_asks_a_coordinator_with_keys_by_a_client_s_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    flags = ("--keys", str(tmp_path / "keys"), "--bind", "tcp://0.0.0.0:0")
    with coordinator_process(tmp_path, *flags) as coordinator:
        address = coordinator.address.replace("0.0.0.0", "127.0.0.1")
        words = ["--coordinator", address, "--once", "--interval-s", "0.05"]
        assert main(["top", *words, "--keys", str(tmp_path / "keys" / "client.key")]) == 0
    assert "0 of 0 ranks" in capsys.readouterr().out
