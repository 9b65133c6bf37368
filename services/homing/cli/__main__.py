"""`homing COMMAND ...`: finds the command and hands it the rest of the line."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from homing.errors import ConfigError
from homing.observe import EXIT_CONFIG_ERROR, run_main

Run = Callable[[Sequence[str]], int]

BENCHES = {
    "serve": "any OpenAI server, by streamed completions: TTFT, ITL, tokens/s, cached tokens",
    "coordinator": "the coordinator alone: CPU time of a request and of an Output",
    "agreement": "log-probabilities of the engine against those of transformers",
    "weights": "updates of a model's weights beside a plain memcpy",
    "suspend": "the memory of an engine while it is suspended",
    "precision": "formats of weights and KV cache: speed, memory, log-probabilities beside fp32",
    "engine": "one model in this process: decode and prefill beside the machine's limits",
    "soak": "random traffic on a small cache: whether every answer is right and nothing leaks",
    "frontend": "one frontend process: what a request and a streamed token cost beside a bare app",
    "route": "the routing policies, by replaying request traces",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The `homing` command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run_main(lambda: _dispatch("homing", COMMANDS, words))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as a shell reports it
    except BrokenPipeError:
        if not _nobody_reads_stdout():
            raise
        return 128 + signal.SIGPIPE


def _nobody_reads_stdout() -> bool:
    """As in `homing --help | head -1`. Then what is left of it goes nowhere, without a word."""
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, 0)  # errors are always told
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


def _dispatch(program: str, commands: Mapping[str, tuple[str, Run]], argv: Sequence[str]) -> int:
    match argv:
        case []:
            print(_help(program, commands), file=sys.stderr)
            return EXIT_CONFIG_ERROR
        case ["-h" | "--help", *_]:
            print(_help(program, commands))
            return 0
        case [name, *rest] if name in commands:
            return commands[name][1](rest)
        case [name, *_]:
            raise ConfigError(f"{name!r} is not a command; `{program} --help` lists them")
    raise AssertionError("a sequence is empty or not")


def _help(program: str, commands: Mapping[str, tuple[str, Run]]) -> str:
    lines = [f"usage: {program} COMMAND ...", "", *_HEADS.get(program, []), "commands:"]
    width = max(map(len, commands))
    lines += [f"  {name:<{width}}  {text}" for name, (text, _) in commands.items()]
    lines += ["", f"`{program} COMMAND --help` tells more."]
    return "\n".join(lines)


def _serve(argv: Sequence[str]) -> int:
    import tyro

    from homing.launch.config import LaunchConfig
    from homing.launch.serve import serve

    pairs_off = (tyro.conf.FlagCreatePairsOff,)  # --verbose, without a --no-verbose
    return serve(tyro.cli(LaunchConfig, prog="homing serve", args=argv, config=pairs_off))


def _service(name: str) -> Run:
    """Become the service's own process: recognisable in ps, and nothing of it is imported here."""

    def run(argv: Sequence[str]) -> int:
        os.execv(sys.executable, [sys.executable, "-m", f"homing.{name}", *argv])

    return run


def _here(name: str) -> Run:
    return lambda argv: importlib.import_module(f"homing.cli.{name}").main(argv)


def _bench_main(name: str) -> Run:
    return lambda argv: importlib.import_module(f"homing.bench.{name}").main(argv)


def _bench(argv: Sequence[str]) -> int:
    benches = {name: (text, _bench_main(name)) for name, text in BENCHES.items()}
    return _dispatch("homing bench", benches, argv)


def _version(_: Sequence[str]) -> int:
    from importlib.metadata import version

    print(f"homing {version('homing')}")
    return 0


COMMANDS: Mapping[str, tuple[str, Run]] = {
    "serve": ("serve a model over HTTP: starts and supervises all the processes below", _serve),
    "coordinator": (
        "run the coordinator alone: routes requests to engines",
        _service("coordinator"),
    ),
    "engine": ("run one engine rank alone: computes tokens with torch", _service("engine")),
    "frontend": ("run one HTTP frontend alone: the OpenAI API", _service("frontend")),
    "top": ("show a running fleet: ranks, load, KV use, prefix hits, tokens/s", _here("top")),
    "drain": ("let an engine rank finish what it has, and leave", _here("drain")),
    "keygen": ("make the keys of a fleet that other machines can reach", _here("keygen")),
    "bench": ("measure a server or a part; prints JSON", _bench),
    "version": ("print the version", _version),
}
_HEADS = {
    "homing": ["Serve large language models from many engine replicas behind one address.", ""],
    "homing bench": ["Each bench prints one JSON object with a list `results`.", ""],
}

if __name__ == "__main__":
    sys.exit(main())
