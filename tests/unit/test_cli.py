"""The `homing` command: what it prints, and what it does not import."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from homing.cli.__main__ import BENCHES, COMMANDS, main

HEAVY = ["torch", "transformers", "zmq", "quart", "hypercorn", "httpx"]


def loaded_after(*words: str) -> set[str]:
    """The heavy libraries that a fresh process has imported once it has run `homing WORDS`."""
    code = (
        "import contextlib, json, sys\n"
        "from homing.cli.__main__ import main\n"
        f"with contextlib.suppress(SystemExit): main({list(words)!r})\n"
        f"print(); print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["bench"], ["version"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    assert loaded_after(*words) == set()


def test_a_launch_that_fails_early_has_loaded_nothing_heavy() -> None:
    assert loaded_after("serve", "/no/such/model") == set()


def test_help_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, (text, _) in COMMANDS.items():
        assert f"  {name} " in listed
        assert text in listed


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_that_is_listed_is_there(name: str) -> None:
    assert callable(importlib.import_module(f"homing.bench.{name}").main)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_stops_reading_the_output_ends_the_command_without_a_word(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "homing.cli", "bench", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=60, check=False
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["frobnicate"],
            "homing: error: 'frobnicate' is not a command; `homing --help` lists them",
        ),
        (
            ["bench", "frobnicate"],
            "homing: error: 'frobnicate' is not a command; `homing bench --help` lists them",
        ),
        (
            ["serve", "/no/such/model"],
            "homing: error: no model at /no/such/model: "
            "name a Hugging Face directory or a .gguf file",
        ),
        (
            ["serve", "--port", "70000"],
            "homing: error: --port is 70000; it must be from 0 to 65535",
        ),
        (
            ["serve", "--data-parallel-size", "0"],
            "homing: error: --data-parallel-size is 0; the least is 1",
        ),
    ],
)
def test_a_mistake_is_one_line_and_a_failure(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) != 0
    assert capsys.readouterr().err.splitlines() == [line]


def test_every_flag_of_serve_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--data-parallel-size", "--routing-alpha", "--kv-cache-gb", "--prefix-ttl-s"):
        assert flag in text
