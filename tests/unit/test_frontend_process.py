"""`python -m homing.frontend` as a process: before there is a fleet, and when told to stop."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from homing.errors import ConfigError
from homing.frontend.config import FrontendConfig


@contextmanager
def frontend(*flags, pass_fds=()):
    """The process; it is gone when the block ends."""
    command = [sys.executable, "-m", "homing.frontend", *flags]
    process = subprocess.Popen(command, pass_fds=pass_fds, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def coordinator(tmp_path):
    return f"ipc://{tmp_path}/nobody"


def get(listener, path):
    """Status and body. The socket listens already, so a client waits for the process to start."""
    host, port = listener.getsockname()
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_answers_before_a_coordinator_exists_and_stops_when_told(listener, coordinator):
    flags = ["--coordinator", coordinator, "--fd", str(listener.fileno())]
    with frontend(*flags, pass_fds=[listener.fileno()]) as process:
        status, body = get(listener, "/health")
        assert (status, body["status"]) == (503, "the coordinator does not answer")
        assert body["pid"] == process.pid
        assert get(listener, "/v1/models")[0] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_it_stops_when_its_parent_is_gone(listener, coordinator):
    read_end, write_end = socket.socketpair()
    flags = ["--coordinator", coordinator, "--fd", str(listener.fileno())]
    flags += ["--lifeline-fd", str(read_end.fileno())]
    with frontend(*flags, pass_fds=[listener.fileno(), read_end.fileno()]) as process:
        read_end.close()
        get(listener, "/health")
        write_end.close()
        process.wait(timeout=60)


def test_a_port_that_is_taken_is_a_one_line_error(listener, coordinator):
    port = str(listener.getsockname()[1])
    with frontend("--coordinator", coordinator, "--port", port) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in errors


def test_without_a_coordinator_it_gives_up_in_time_and_says_so(coordinator):
    flags = ["--coordinator", coordinator, "--port", "0", "--join-timeout-s", "0.3"]
    start = time.monotonic()
    with frontend(*flags) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no coordinator answers" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert time.monotonic() - start < 30


def test_it_imports_neither_torch_nor_transformers():
    check = (
        "import sys, homing.frontend.__main__;"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "settings", [{"port": -1}, {"port": 70000}, {"max_inflight": 0}, {"drain_s": -1.0}]
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        FrontendConfig(coordinator="tcp://127.0.0.1:1", **settings)
