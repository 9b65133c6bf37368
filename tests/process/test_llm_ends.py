"""However a program with an `LLM` begins or ends, no process is left."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homing.errors import ConfigError, Unavailable
from homing.llm import LLM, AsyncLLM, EngineConfig
from tests.support.tiny_llm import SMALL, greedy, processes_of, wait_until_none
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(180)

SETTINGS = "EngineConfig(buffer_size_gb=0.02, max_requests=8, dtype='fp32', num_threads=1)"
PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
from homing.llm import LLM, EngineConfig, SamplingParams
llm = LLM(sys.argv[1], engine_config={SETTINGS}, use_coordinator=True, data_parallel_size=1)
greedy = SamplingParams(temperature=0, num_tokens_to_generate=4)
print(llm.generate([5, 6, 7], greedy)[0].generated_tokens, flush=True)
"""
CELLS = f"""
import io, sys
sys.stderr = io.StringIO()  # a notebook's is no file
from homing.llm import LLM, AsyncLLM, EngineConfig, SamplingParams
greedy = SamplingParams(temperature=0, num_tokens_to_generate=4)
llm = LLM(sys.argv[1], engine_config={SETTINGS}, use_coordinator=True)
print(llm.generate([5, 6, 7], greedy, progress=True)[0].generated_tokens)
beside = AsyncLLM(sys.argv[1], engine_config={SETTINGS})
print((await beside.generate([5, 6, 7], greedy, progress=True)).generated_tokens)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "own")


@contextmanager
def started(model: Path, code: str, *session: str) -> Iterator[subprocess.Popen[str]]:
    """As a script without a guard, or typed at the prompt that `session` starts."""
    program = textwrap.dedent(code)
    script = model.parent / "script.py"
    script.write_text(program)
    with subprocess.Popen(
        [sys.executable, *(session or [str(script)]), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if session:
                assert process.stdin is not None
                process.stdin.write(program)
                process.stdin.flush()
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_script_that_fails_without_a_shutdown_leaves_nothing(model: Path) -> None:
    program = PROGRAM + "assert 'torch' not in sys.modules, 'it computes nothing'\n"
    with started(model, program + "raise ValueError('on purpose')") as process:
        output, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert output.startswith("[")
    assert errors.count("Traceback") == 1
    assert "ValueError: on purpose" in errors
    wait_until_none(model, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_killed_leaves_nothing(model: Path, number: signal.Signals) -> None:
    endless = PROGRAM.replace("data_parallel_size=1", "data_parallel_size=2")
    endless += "llm.generate('a', SamplingParams(ignore_eos=True))\n" * 500
    with started(model, endless) as process:
        assert first_line(process).startswith("[")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -number, errors
    wait_until_none(model)


def test_a_session_at_the_prompt_generates_and_ends(model: Path) -> None:
    with started(model, PROGRAM, "-i", "-q", "-") as process:
        output, errors = process.communicate("exit()\n", timeout=90)
    assert process.returncode == 0, errors
    assert "[" in output
    wait_until_none(model, 5)


def test_the_cells_of_a_notebook_generate_and_await(model: Path) -> None:
    """There, too, a loop runs that runs each cell."""
    with started(model, CELLS, "-m", "asyncio") as process:
        output, _ = process.communicate("exit()\n", timeout=90)
    assert process.returncode == 0
    first, second = re.findall(r"\[[\d, ]+\]", output)
    assert first == second
    wait_until_none(model, 5)


def test_one_that_is_forgotten_is_shut_down(model: Path) -> None:
    llm = LLM(model, engine_config=SMALL, use_coordinator=True)
    llm.generate([5], greedy(1))
    del llm
    gc.collect()
    assert not processes_of(model)


async def test_an_async_start_that_fails_is_raised_where_it_is_waited_for(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="engine-0 cannot run with these settings"):
        async with AsyncLLM(model, engine_config=SMALL):
            pass
    assert not processes_of(model)


async def test_a_start_that_takes_too_long_is_given_up(model: Path) -> None:
    config = EngineConfig(buffer_size_gb=0.02, start_timeout_s=0.2)
    with pytest.raises(Unavailable, match=r"after 0\.2 s"):
        async with AsyncLLM(model, engine_config=config):
            pass
    assert not processes_of(model)


async def test_a_shutdown_during_the_start_leaves_nothing(model: Path) -> None:
    llm = AsyncLLM(model, engine_config=SMALL)
    deadline = time.monotonic() + 60
    while not processes_of(model):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await llm.shutdown()
    assert not processes_of(model)
