"""Ranks of torchrun jobs: one engine each, HTTP by the first, one end for all."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.support.tiny_llm import processes_of, wait_until_none
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(240)

SMALL = [
    *("--kv-cache-gb", "0.02", "--max-batch-requests", "8", "--num-threads", "1"),
    *("--frontend-replicas", "1", "--dtype", "fp32"),
]
READY = "Homing is ready: http://127.0.0.1:"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


@contextmanager
def node(
    log: Path, *arguments: str, number: int = 0, num_nodes: int = 1, port: int
) -> Iterator[subprocess.Popen[str]]:
    """One `torchrun`, as on one machine of several."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(num_nodes), "--node-rank", str(number)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port)),
        *arguments,
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    """A free one: every node has to be told the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def read_url(stdout: IO[str] | None, log: Path) -> str:
    """From the ready line; other lines are passed over."""
    assert stdout is not None
    for line in stdout:
        if line.startswith(READY):
            return line.split()[3]
    raise AssertionError(f"no ready line: {log.read_text()[-3000:]}")


def test_two_nodes_serve_http_by_the_first_and_end_together(
    model: Path, tmp_path: Path, port: int
) -> None:
    """With keys, as two machines need them."""
    keys = tmp_path / "keys"
    subprocess.run([sys.executable, "-m", "homing.cli", "keygen", str(keys)], check=True)
    serve = ["--nproc-per-node", "1", "-m", "homing.launch", str(model), "--port", "0", *SMALL]
    serve += ["--keys", str(keys)]
    logs = [tmp_path / f"node{number}.log" for number in range(2)]
    with (
        node(logs[0], *serve, number=0, num_nodes=2, port=port) as first,
        node(logs[1], *serve, number=1, num_nodes=2, port=port) as second,
    ):
        url = read_url(first.stdout, logs[0])
        health = httpx.get(f"{url}/health", timeout=60).json()
        assert [rank["rank"] for rank in health["ranks"] if rank["live"]] == [0, 1]
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        texts = {
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for _ in range(4)
        }
        assert len(texts) == 1
        # The rank's launcher, not torchrun: that would tell nobody.
        [launcher] = [
            p for p in processes_of(model) if is_launcher(p.cmdline(), first.pid, p.ppid())
        ]
        launcher.send_signal(signal.SIGTERM)
        codes = first.wait(60), second.wait(60)
    wait_until_none(model)
    assert codes == (0, 0), logs[1].read_text()[-3000:]


def is_launcher(words: list[str], torchrun: int, parent: int) -> bool:
    return "homing.launch" in words and parent == torchrun


SCRIPT = """
import sys, torch.distributed as dist
from homing.llm import LLM, EngineConfig, SamplingParams

def run():
    with LLM(sys.argv[1], engine_config=config, use_coordinator=True) as llm:
        if llm.is_primary_rank:
            tokens = [result.generated_tokens for result in llm.generate([[5, 6, 7]] * 4, greedy)]
            print("primary", sorted(llm.pause()), all(t == tokens[0] for t in tokens), flush=True)
        else:
            try:
                llm.generate([5, 6, 7], greedy)
            except RuntimeError as error:
                print("other", error, flush=True)

config = EngineConfig(buffer_size_gb=0.02, max_requests=8, dtype="fp32", num_threads=1)
greedy = SamplingParams(temperature=0, num_tokens_to_generate=6)
run()
dist.init_process_group("gloo")  # as a trainer would
run()
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_a_script_are_engines_of_one_llm_beside_a_trainers_process_group(
    model: Path, tmp_path: Path, port: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    log = tmp_path / "node.log"
    with node(log, "--nproc-per-node", "2", str(script), str(model), port=port) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, log.read_text()[-3000:]
    assert sorted(output.splitlines()) == [
        *["other generate: on the primary rank alone; see is_primary_rank"] * 2,
        *["primary [0, 1] True"] * 2,
    ]
    wait_until_none(model)
