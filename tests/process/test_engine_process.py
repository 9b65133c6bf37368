"""`python -m homing.engine` as a process, with a coordinator that does what the test says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from homing.wire import (
    Abort,
    Delta,
    FinishReason,
    Goodbye,
    Hello,
    ModelCard,
    Output,
    Refused,
    Rejoin,
    Role,
    Welcome,
    read_payload,
)
from tests.support import engine_session
from tests.support.engine_session import submit
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.tiny_models import make_tiny_model

START_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    with ScriptedCoordinator() as scripted:
        yield scripted


def welcome(coordinator: ScriptedCoordinator) -> Welcome:
    incarnation = coordinator.incarnation
    return replace(engine_session.welcome(), incarnation=incarnation, rank=0, heartbeat_s=0.2)


class EngineProcess:
    def __init__(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "homing.engine", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ended(self, timeout_s: float = START_S) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr


def start(model: Path, coordinator: ScriptedCoordinator, *arguments: str) -> EngineProcess:
    flags = [str(model), "--coordinator", coordinator.address, "--num-threads", "1"]
    return EngineProcess(*flags, "--kv-cache-gb", "0.05", "--rank", "0", *arguments)


async def answer(coordinator: ScriptedCoordinator, request_id: int) -> list[Delta]:
    """The request's deltas up to its end."""
    found: list[Delta] = []
    while not (found and found[-1].finish):
        _, output = await coordinator.next(Output, START_S)
        deltas = read_payload(output.deltas or b"", list[Delta])
        found += [delta for delta in deltas if delta.request_id == request_id]
    return found


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in array("I", delta.tokens)]


async def test_an_engine_joins_answers_and_stops(model: Path, coordinator: ScriptedCoordinator):
    with start(model, coordinator, "--served-model-name", "small") as engine:
        peer, hello = await coordinator.next(Hello, START_S)
        card = read_payload(hello.model_card or b"", ModelCard)
        assert (hello.role, hello.rank, card.name) == (Role.ENGINE, 0, "small")
        assert card.tokenizer_dir == str(model)
        coordinator.send(peer, welcome(coordinator))

        coordinator.send(peer, submit(1, 1, prompt=[9, 10, 11], max_new_tokens=5))
        first = tokens(await answer(coordinator, 1))
        assert len(first) == 5

        coordinator.router.send(peer, [b"garbage"])
        coordinator.send(peer, submit(1, 2, prompt=[], max_new_tokens=5))
        [error] = await answer(coordinator, 2)
        assert error.finish is not None
        assert error.finish.reason is FinishReason.ERROR

        coordinator.send(peer, submit(1, 3, prompt=[9, 10, 12], max_new_tokens=200))
        coordinator.send(peer, Abort(1, 3, 0))
        aborted = await answer(coordinator, 3)
        assert aborted[-1].finish is not None
        assert aborted[-1].finish.reason is FinishReason.ABORT

        coordinator.send(peer, Rejoin(coordinator.incarnation))
        _, hello = await coordinator.next(Hello, START_S)
        assert hello.incarnation == 1
        coordinator.send(peer, welcome(coordinator))
        coordinator.send(peer, submit(1, 4, prompt=[9, 10, 11], max_new_tokens=5))
        assert tokens(await answer(coordinator, 4)) == first

        engine.process.send_signal(signal.SIGTERM)
        await coordinator.next(Goodbye, START_S)
        code, stderr = engine.ended()
        assert code == 0, stderr
        assert "Traceback" not in stderr


async def test_an_engine_that_is_refused_says_why_in_one_line(
    model: Path, coordinator: ScriptedCoordinator
):
    with start(model, coordinator) as engine:
        peer, _ = await coordinator.next(Hello, START_S)
        coordinator.send(peer, Refused("the fleet serves another model"))
        code, stderr = engine.ended()
        assert code == 2
        assert stderr.splitlines()[-1] == (
            "homing engine: error: the coordinator refuses this engine: "
            "the fleet serves another model"
        )
        assert "Traceback" not in stderr


async def test_an_engine_whose_parent_is_gone_stops(model: Path, coordinator: ScriptedCoordinator):
    lifeline, parent_end = os.pipe()
    flags = [str(model), "--coordinator", coordinator.address, "--kv-cache-gb", "0.05"]
    with EngineProcess(*flags, "--lifeline-fd", str(lifeline), pass_fds=(lifeline,)) as engine:
        os.close(lifeline)
        await coordinator.next(Hello, START_S)
        os.close(parent_end)
        code, _ = engine.ended()
        assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "no model at /nowhere"),
        (["MODEL", "--kv-cache-gb", "0.0001"], "raise --kv-cache-gb to"),
    ],
)
def test_settings_that_cannot_work_end_it_in_one_line(
    model: Path, arguments: list[str], message: str
):
    arguments = [str(model) if argument == "MODEL" else argument for argument in arguments]
    with EngineProcess(*arguments, "--coordinator", "tcp://127.0.0.1:1") as engine:
        code, stderr = engine.ended()
    assert code == 2
    assert message in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_an_engine_starts_without_what_it_does_not_use(model: Path):
    code = (
        "import sys\n"
        "from homing.engine.config import EngineConfig\n"
        "from homing.engine.startup import load_engine\n"
        "load_engine(EngineConfig(model=sys.argv[1], coordinator='', kv_cache_gb=0.05))\n"
        "print(*{'torch._dynamo', 'sympy', 'transformers', 'jinja2'} & set(sys.modules))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code, str(model)], text=True)
    assert loaded.split() == []


def test_an_engine_that_finds_no_coordinator_gives_up(model: Path, tmp_path: Path):
    address = f"ipc://{tmp_path}/nobody"
    flags = [str(model), "--coordinator", address, "--join-timeout-s", "0.5"]
    with EngineProcess(*flags) as engine:
        code, stderr = engine.ended()
    assert code == 1
    assert stderr.splitlines()[-1] == "homing engine: error: no coordinator answered in 1 s"
