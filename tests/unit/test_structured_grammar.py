"""Whatever tokens a model prefers, those that a grammar lets through spell a text that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from homing.engine.structured.compiler import GrammarCompiler
from homing.params import Regex
from homing.tokenizer import Tokenizer
from tests.support.backends import demo_files
from tests.support.byte_model import EOS, IM_END, byte_fallback, byte_level
from tests.support.structured import DEFINITIONS, allowed, check_fits, random_walk

VOCAB_SIZE = 300
"""Larger than the byte tokenizers', as models pad theirs."""


@dataclass
class Vocabulary:
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compiler: GrammarCompiler


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "SmolLM2"])
def vocabulary(request, tmp_path_factory) -> Iterator[Vocabulary]:
    directory = tmp_path_factory.mktemp("tokenizer")
    match request.param:
        case "byte level":
            size, eos = VOCAB_SIZE, (EOS,)
            byte_level(directory)
        case "byte fallback":
            size, eos = VOCAB_SIZE, (EOS, IM_END)
            byte_fallback(directory)
        case _:
            directory, size, eos = demo_files().directory, 49_152, (2,)
    compiler = GrammarCompiler(directory, size, eos)
    yield Vocabulary(Tokenizer.from_dir(directory), size, eos, compiler)
    compiler.close()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_random_tokens_spell_a_text_that_fits(vocabulary: Vocabulary, name: str):
    grammar = vocabulary.compiler.compile(DEFINITIONS[name]).result()
    for seed in range(8):
        tokens = random_walk(grammar, vocabulary.tokenizer, vocabulary.vocab_size, seed)
        assert tokens[-1] in vocabulary.eos_token_ids
        check_fits(name, vocabulary.tokenizer.to_bytes(tokens[:-1]).decode())


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_replayed_answer_is_where_the_first_one_was(vocabulary: Vocabulary, name: str):
    grammar = vocabulary.compiler.compile(DEFINITIONS[name]).result()
    tokens = random_walk(grammar, vocabulary.tokenizer, vocabulary.vocab_size, seed=99)
    followed = grammar.start()
    for length, token in enumerate(tokens):
        replayed = grammar.start(tokens[:length])
        expected = allowed(followed, vocabulary.vocab_size).tolist()
        assert allowed(replayed, vocabulary.vocab_size).tolist() == expected
        followed.accept(token)
    assert followed.finished
    assert grammar.start(tokens).finished


def test_control_tokens_and_padding_are_never_allowed(vocabulary: Vocabulary):
    """Not even where the grammar lets their spelling through as text."""
    state = vocabulary.compiler.compile(Regex("(?s:.)*")).result().start()
    tokenizer, eos = vocabulary.tokenizer, vocabulary.eos_token_ids
    fits = set(allowed(state, vocabulary.vocab_size).tolist())
    no_text = {t for t in range(vocabulary.vocab_size) if not tokenizer.to_bytes([t])}
    assert fits & no_text == set(eos)
    assert fits - set(eos) == {
        token
        for token in range(vocabulary.vocab_size)
        if _begins_a_text(tokenizer.to_bytes([token])) and token not in eos
    }


def _begins_a_text(data: bytes) -> bool:
    """Whether UTF-8 text may begin so."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return bool(data[:1]) and error.reason == "unexpected end of data" and _may_go_on(data)
    return bool(data)


def _may_go_on(data: bytes) -> bool:
    tails = (b"\x80", b"\xbf", b"\x90", b"\x80\x80", b"\xbf\xbf", b"\x90\x80", b"\x80" * 3)
    return any(_is_text(data + tail) for tail in (*tails, b"\xbf" * 3, b"\x90\x80\x80"))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
