"""`homing serve` with the real services on a tiny model: starts, failures to start, ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import Serving, serving, wait_until
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(300)

LITTLE_MEMORY = ("--kv-cache-gb", "0.05")
SMALL = ("--port", "0", "--frontend-replicas", "1", *LITTLE_MEMORY)
# In which no process may be left, whatever ended the launcher.
END_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Serving]:
    with serving(model, "--data-parallel-size", "2", *LITTLE_MEMORY) as running:
        yield running


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> None:
    """What a test before this one killed is back."""
    if "server" in request.fixturenames:
        running: Serving = request.getfixturevalue("server")
        wait_until(lambda: live_ranks(running) == 2, 120, "both ranks serve")


def live_ranks(running: Serving) -> int | None:
    try:
        return running.health().json()["live_ranks"]
    except httpx.HTTPError:
        return None


class Launch:
    """A launcher that need not become ready, and every process it was ever seen with."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: set[psutil.Process] = set()

    def look(self) -> list[str]:
        """The modules that its children run now."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update(children)
        return [module for child in children if (module := module_of(child))]

    def left(self) -> list[psutil.Process]:
        return [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def module_of(process: psutil.Process) -> str | None:
    try:
        found = re.search(r"-m homing\.(\w+)", " ".join(process.cmdline()))
    except psutil.Error:
        return None
    return found and found[1]


@contextmanager
def launched(*arguments: str) -> Iterator[Launch]:
    command = [sys.executable, "-m", "homing.cli", "serve", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        launch = Launch(process)
        try:
            yield launch
        finally:
            process.kill()
            for survivor in launch.left():
                survivor.kill()


def port_of(running: Serving) -> str:
    return running.base_url.rpartition(":")[2]


def test_the_processes_can_be_told_apart_in_ps(server: Serving) -> None:
    for module, count in [("coordinator", 1), ("engine", 2), ("frontend", 2)]:
        assert len(server.children(module)) == count
    commands = [" ".join(engine.cmdline()) for engine in server.children("engine")]
    ranks = {command.partition("--rank ")[2][0] for command in commands}
    assert ranks == {"0", "1"}


def test_a_second_server_on_the_port_fails_fast_and_leaves_no_child(server: Serving) -> None:
    with launched("--port", port_of(server)) as second:
        wait_until(lambda: second.process.poll() is not None, 60, "the second server has ended")
        assert second.look() == []
        output, errors = second.process.communicate()
    assert second.process.returncode != 0
    assert output == ""
    address = server.base_url.removeprefix("http://")
    assert errors == f"homing: error: cannot listen on {address}: Address already in use\n"
    assert live_ranks(server) == 2


@pytest.mark.parametrize("module", ["engine", "coordinator", "frontend"])
def test_a_process_that_was_killed_comes_back(server: Serving, module: str) -> None:
    count = len(server.children(module))
    killed = server.kill(module)
    if module == "engine":
        wait_until(lambda: live_ranks(server) == 1, 60, "its death is known")

    def is_back() -> bool:
        now = {child.pid for child in server.children(module)}
        return len(now) == count and killed not in now and live_ranks(server) == 2

    wait_until(is_back, 120, f"the {module} is back and both ranks serve")
    # Perhaps to the other frontend, which knows more or less than the one that was asked.
    reply = httpx.post(
        f"{server.base_url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=60
    )
    assert reply.status_code == 200, reply.text


def test_while_frontends_restart_connections_wait_and_are_not_refused(server: Serving) -> None:
    for _ in range(2):
        server.kill("frontend")
    assert server.health().json()["live_ranks"] in (0, 1, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launch_that_ends_while_it_loads_leaves_no_process(
    model: str, number: signal.Signals
) -> None:
    with launched(model, *SMALL) as launch:
        everyone = {"coordinator", "engine", "frontend"}
        wait_until(lambda: set(launch.look()) == everyone, 60, "every process has started")
        launch.process.send_signal(number)
        wait_until(lambda: not launch.left(), END_S, "every process has ended")
        launch.process.communicate()
    assert launch.process.returncode == (-number if number == signal.SIGKILL else 0)


def test_a_model_that_an_engine_refuses_ends_the_launch(tmp_path: Path) -> None:
    with launched(str(tmp_path), *SMALL) as launch:
        wait_until(lambda: "engine" in launch.look(), 60, "the engine has started")
        _, errors = launch.process.communicate(timeout=60)
        assert launch.left() == []
    assert launch.process.returncode != 0
    assert "homing engine: error: " in errors
    assert errors.splitlines()[-1] == (
        "homing: error: engine-0 cannot run with these settings; its error is above"
    )
    assert "Traceback" not in errors


def test_a_launch_past_its_deadline_says_what_it_waited_for(model: str) -> None:
    with launched(model, *SMALL, "--start-timeout-s", "0.3") as launch:
        _, errors = launch.process.communicate(timeout=60)
    assert launch.process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "homing: error: not ready after 0.3 s: 0 of 1 engine ranks serve, "
    )


def test_stdout_has_the_ready_line_and_a_second_signal_waits_for_nobody(model: str) -> None:
    with launched(model, *SMALL, "--served-model-name", "little") as launch:
        assert launch.process.stdout is not None
        line = launch.process.stdout.readline()
        pattern = r"Homing is ready: http://127\.0\.0\.1:\d+ \(little, 1 engine ranks\)\n"
        assert re.fullmatch(pattern, line)
        launch.look()
        (engine,) = [process for process in launch.seen if module_of(process) == "engine"]
        directory = socket_directory(engine)
        assert directory.stat().st_mode & 0o077 == 0, "others may not enter"

        engine.suspend()
        launch.process.send_signal(signal.SIGINT)
        wait_until(lambda: "frontend" not in launch.look(), END_S, "it stops")
        launch.process.send_signal(signal.SIGINT)
        output, errors = launch.process.communicate(timeout=END_S)
        assert launch.left() == []
    assert output == ""
    assert errors.count("stopping at once") == 1
    assert launch.process.returncode == 0
    assert not directory.exists()


def socket_directory(engine: psutil.Process) -> Path:
    command = engine.cmdline()
    return Path(command[command.index("--coordinator") + 1].removeprefix("ipc://")).parent
