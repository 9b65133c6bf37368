"""Compiling definitions: what is refused, what is shared, and that nobody can stall it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.engine.structured import compiler as compiler_module
from homing.engine.structured.compiler import GrammarCompiler
from homing.errors import InvalidRequest
from homing.params import Choice, Grammar, JsonSchema, Regex, StructuredOutput
from tests.support.byte_model import EOS, byte_ids, byte_level
from tests.support.structured import allowed

VOCAB_SIZE = 265


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(directory: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def schema(value: Any) -> JsonSchema:
    return JsonSchema(json.dumps(value))


TWO_MULTIPLES = schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]})
"""Takes minutes to compile."""


def fits(compiler: GrammarCompiler, definition: StructuredOutput, text: str | bytes) -> bool:
    """Whether `text` is a whole answer."""
    state = compiler.compile(definition).result().start()
    for token in (*byte_ids(text), EOS):
        if token not in allowed(state, VOCAB_SIZE):
            return False
        state.accept(token)
    return state.finished


# What a definition means


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"multipleOf": 7, "type": "integer"}, "14", "15"),
        ({"type": "integer", "minimum": 13, "maximum": 47}, "14", "8"),
        ({"type": "number", "exclusiveMaximum": 2.5}, "2.4", "2.5"),
        ({"type": "string", "minLength": 3, "maxLength": 4}, '"äöü"', '"äö"'),
        ({"type": "string", "pattern": "b"}, '"abc"', '"aac"'),
        ({"type": "string", "pattern": '^["\n]$'}, r'"\n"', '"\n"'),
        ({"type": "string", "format": "email"}, '"a@b.de"', '"a"'),
        ({"type": "object", "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
        ({"patternProperties": {"^x": {"type": "null"}}}, '{"x":null}', '{"x":1}'),
        ({"const": {"a": [1, None]}}, '{"a": [1, null]}', '{"a":[1]}'),
        ({"type": ["null", "boolean"]}, "true", '"true"'),
        ({"type": "object"}, '{"a":{"b":[]}}', "[]"),
        ({}, '[{}, "", 1e9]', "nil"),
    ],
)
def test_a_schema_lets_through_what_fits_alone(compiler, value, good, bad):
    assert fits(compiler, schema(value), good)
    assert not fits(compiler, schema(value), bad)


def test_a_json_answer_may_be_laid_out_but_not_with_blanks_without_end(compiler):
    definition = schema({"type": "array", "items": {"type": "integer"}})
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]", "[\n\t1,\n\t2\n]"):
        assert fits(compiler, definition, text)
    for text in (" [1,2]", "[1,2]\n", "[1,  2]", "[\n\n1]", "[1,\n" + " " * 33 + "2]"):
        assert not fits(compiler, definition, text)


def test_a_schema_can_ask_for_its_own_white_space(compiler):
    definition = schema({"type": "array", "x-guidance": {"whitespace_pattern": r"\t"}})
    assert fits(compiler, definition, "[1,\t2]")
    assert not fits(compiler, definition, "[1, 2]")


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5))
def test_any_text_can_be_a_choice_and_nothing_else_is(compiler, choices):
    definition = Choice(tuple(choices))
    for choice in choices:
        assert fits(compiler, definition, choice)
        if choice + "x" not in choices:
            assert not fits(compiler, definition, choice + "x")


@pytest.mark.parametrize("pattern", ["ab?", "^ab?$"])
def test_a_pattern_is_matched_by_the_whole_answer(compiler, pattern):
    assert fits(compiler, Regex(pattern), "a")
    assert fits(compiler, Regex(pattern), "ab")
    assert not fits(compiler, Regex(pattern), "abb")
    assert not fits(compiler, Regex(pattern), "cab")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "<" (word | root)* ">"\nword ::= [a-z]+',
        'start: "<" (WORD | start)* ">"\nWORD: /[a-z]+/',
    ],
)
def test_a_grammar_may_be_written_as_gbnf_or_lark(compiler, text):
    assert fits(compiler, Grammar(text), "<<ab>c<>>")
    assert not fits(compiler, Grammar(text), "<<ab>c<>")


# What is refused


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (schema({"not": {"type": "null"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"if": {"type": "null"}, "then": False}), '"if", "then"'),
        (schema({"type": "strin"}), "strin"),
        (schema({"type": "string", "format": "colour"}), "colour"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (schema({"$ref": "http://example.com/schema"}), "http://example.com/schema"),
        (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema({"type": "array", "items": False, "minItems": 1}), "[Uu]nsatisfiable"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text fits it"),
        (Regex("(a"), "regex parse error"),
        (Regex(r"(a)\1"), "backreferences are not supported"),
        (Regex(r"\bword"), "lookarounds not supported"),
        (Regex(r"a[^\s\S]"), "no text fits it"),
        (Grammar("a sentence"), "Expected ::="),
        (Grammar("start: nothing"), "unknown name"),
        (Grammar('root ::= "a'), "Unexpected end of input"),
        (Grammar("root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "recursion"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(compiler, definition, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(definition).result()
    assert caught.value.field == "structured_output"
    assert len(str(caught.value)) < 600


def test_a_model_that_cannot_end_an_answer_is_not_asked_for_one(directory):
    compiler = GrammarCompiler(directory, VOCAB_SIZE, ())
    with pytest.raises(InvalidRequest, match="no end-of-sequence id"):
        compiler.compile(Regex("a")).result()
    compiler.close()


# What it costs


def test_a_definition_is_compiled_once_whoever_asks(compiler):
    future = compiler.compile(Regex("once"))
    assert compiler.compile(Regex("once")) is future
    refused = compiler.compile(Regex("(once"))
    assert refused.exception() is not None
    assert compiler.compile(Regex("(once")) is refused


def test_the_definition_used_least_recently_is_forgotten(directory, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))
    first, second = compiler.compile(Regex("1")), compiler.compile(Regex("2"))
    assert compiler.compile(Regex("1")) is first
    compiler.compile(Regex("3"))
    assert compiler.compile(Regex("1")) is first
    assert compiler.compile(Regex("2")) is not second
    compiler.close()


def test_a_grammar_that_hit_a_limit_is_compiled_anew(compiler):
    future = compiler.compile(Regex("anew"))
    state = future.result().start()
    state.accept(byte_ids("x")[0])
    assert state.error is not None
    assert "doesn't satisfy the grammar" in state.error
    again = compiler.compile(Regex("anew"))
    assert again is not future
    assert fits(compiler, Regex("anew"), "anew")


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (TWO_MULTIPLES, "more than 2 s to compile|too much memory"),
        (schema({"type": "integer", "multipleOf": 10**8 + 7}), "more than 2 s|too much memory"),
        (Regex("a{200000}"), "more than 50 ms for one token"),
    ],
    ids=["two multiples", "one large multiple", "repeats"],
)
def test_a_hostile_definition_is_given_up_and_the_next_one_served(compiler, definition, reason):
    """Some take minutes: what tries them is ended after two seconds of CPU time."""
    with pytest.raises(InvalidRequest, match=reason):
        compiler.compile(definition).result(timeout=60)
    assert fits(compiler, Regex("next"), "next")


def test_closing_ends_the_thread_and_the_process_amid_their_work(directory):
    before = set(psutil.Process().children())
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))
    compiler.compile(Regex("warm")).result()
    [child] = set(psutil.Process().children()) - before
    future = compiler.compile(TWO_MULTIPLES)
    compiler.close()
    assert future.cancelled() or isinstance(future.exception(), InvalidRequest)
    assert not child.is_running()


def test_a_process_that_died_idle_is_replaced(directory):
    before = set(psutil.Process().children())
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))
    compiler.compile(Regex("first")).result()
    [child] = set(psutil.Process().children()) - before
    child.kill()
    child.wait()
    assert fits(compiler, Regex("second"), "second")
    compiler.close()


def test_a_fault_of_the_process_is_no_fault_of_the_definition(directory, monkeypatch):
    """The same definition is tried again."""
    compiler = GrammarCompiler(directory, VOCAB_SIZE, (EOS,))
    with monkeypatch.context() as context:
        context.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match="exit code 1"):
            compiler.compile(Regex("a")).result()
    assert fits(compiler, Regex("a"), "a")
    compiler.close()
