"""A process of its own that tries a definition before the engine compiles it.

A schema of a hundred bytes can take minutes and gigabytes to compile, and no thread can be stopped
at that. So a child goes first: it translates the definition into the library's own format, compiles
it, and dies of it if that takes too much. The engine then repeats what the child survived.

    parent -> child   {"kind": "JsonSchema", "text": "..."}, one line
    child -> parent   {"grammar": "..."} or {"error": "..."}, one line

The child ends with its input: it outlives no parent.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from homing.engine.structured.vocabulary import byte_vocabulary
from homing.params import Choice, Grammar, JsonSchema, Regex, StructuredOutput
from homing.params.structured import JSON_WHITESPACE, invalid

MAX_COMPILE_S = 2.0
"""CPU time for one definition. 2,000 optional properties take 0.5 s."""
MAX_MEMORY_BYTES = 2**29
"""Address space of the child."""
MAX_ERROR_CHARACTERS = 500

LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""States take 1 to 2 kB each, and no ordinary definition needs 3,000."""


class Screening:
    """The parent's end. Starts its child when first needed, and again when it died."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def translate(self, definition: StructuredOutput) -> str:
        """The definition in the library's format. Raises InvalidRequest if it has none, or costs
        too much."""
        child = self._live_child()
        assert child.stdin is not None
        assert child.stdout is not None
        kind, text = _as_text(definition)
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            child.stdin.write(json.dumps({"kind": kind, "text": text}).encode() + b"\n")
            child.stdin.flush()
        reply = child.stdout.readline()
        if not reply:
            raise _why_it_died(child.wait())
        result = json.loads(reply)
        if "error" in result:
            raise invalid(result["error"])
        return result["grammar"]

    def _live_child(self) -> subprocess.Popen[bytes]:
        if self._child and self._child.poll() is not None:
            self.close()
        self._child = self._child or _start()
        return self._child

    def kill(self) -> None:
        """Kill the child, from any thread: a `translate` that waits for it fails."""
        if child := self._child:
            child.kill()

    def close(self) -> None:
        """Kill the child, and close its pipes."""
        self.kill()
        if child := self._child:
            self._child = None
            # A child that died at once leaves a line that cannot be flushed any more.
            with contextlib.suppress(BrokenPipeError), child:
                pass


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "homing.engine.structured.screening"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a traceback of the child's would name a stranger's schema
    )


def _why_it_died(exit_code: int) -> Exception:
    if exit_code >= 0:
        return RuntimeError(f"the screening process ended with exit code {exit_code}")
    if exit_code == -signal.SIGPROF:
        return invalid(f"it takes more than {MAX_COMPILE_S:g} s to compile")
    return invalid("it takes too much memory to compile")


def _as_text(definition: StructuredOutput) -> tuple[str, str]:
    match definition:
        case JsonSchema(schema=text) | Regex(pattern=text) | Grammar(text=text):
            return type(definition).__name__, text
        case Choice(choices=choices):
            return "Regex", "|".join(map(re.escape, choices))


# The child


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = byte_vocabulary()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)  # its signal ends the process
        try:
            grammar = _grammar(request["kind"], request["text"])
            error = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS).get_error()
            reply = {"error": error[:MAX_ERROR_CHARACTERS]} if error else {"grammar": grammar}
        except Exception as failure:  # of any type: the translators are fed by strangers
            reply = {"error": (str(failure) or repr(failure))[:MAX_ERROR_CHARACTERS]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _grammar(kind: str, text: str) -> str:
    match kind:
        case "JsonSchema":
            return LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": JSON_WHITESPACE}
            )
        case "Regex":
            return LLMatcher.grammar_from_regex(text)
        case _:
            return LLMatcher.grammar_from_lark(any_to_lark(text))


if __name__ == "__main__":
    main()
