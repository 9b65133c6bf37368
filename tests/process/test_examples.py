"""Every example in docs/examples, and every block of docs/python.md, run on a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_llm import wait_until_none
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"

RUNS = {
    "offline_generation.py": [
        ["--num-tokens", "8"],
        ["--num-tokens", "8", "--use-coordinator", "--mode", "async"],
    ],
    "manual_stepping.py": [["--num-tokens", "12"]],
    "coordinator_and_client.py": [["--num-tokens", "8", "--num-engines", "2"]],
    "server_with_clients.py": [["--num-tokens", "8", "--num-clients", "3"]],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


def run(name: str, model: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--model", str(model), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    wait_until_none(model, 5)
    return done.stdout


def answers(output: str) -> list[str]:
    """What offline generation says of each prompt, without the times."""
    return [line for line in output.splitlines() if " -> " in line]


def test_offline_generation_gives_the_same_in_every_mode(model: Path) -> None:
    outputs = [
        answers(run("offline_generation.py", model, a)) for a in RUNS["offline_generation.py"]
    ]
    assert len(outputs[0]) == 3
    assert outputs[1] == outputs[0]


def test_manual_stepping_aborts_one_and_finishes_three(model: Path) -> None:
    output = run("manual_stepping.py", model, *RUNS["manual_stepping.py"])
    ends = [line for line in output.splitlines() if line.startswith("request ")]
    assert len(ends) == 4
    assert [line for line in ends if "(abort" in line] == [ends[0]]
    assert "8 tokens cached" in ends[-1]


def test_coordinator_and_client_answer_each_prompt(model: Path) -> None:
    output = run("coordinator_and_client.py", model, *RUNS["coordinator_and_client.py"])
    assert output.count(" -> ") == 2
    assert "requests the fleet has served: 2" in output


def test_server_with_clients_answers_them_and_itself(model: Path) -> None:
    output = run("server_with_clients.py", model, *RUNS["server_with_clients.py"])
    assert re.search(r"serving at http://127\.0\.0\.1:\d+", output)
    assert len(re.findall(r"^client \d: ", output, re.MULTILINE)) == 3
    assert "here: " in output


def test_the_blocks_of_the_python_guide_run(model: Path, tmp_path: Path) -> None:
    """As one program: later blocks use names of earlier ones."""
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = "\n\n".join(blocks).replace('"path/to/model"', repr(str(model)))
    script = tmp_path / "guide.py"
    script.write_text(program.replace("buffer_size_gb=0.5", "buffer_size_gb=0.02"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wait_until_none(model, 5)
