"""Encoding, decoding and what single tokens look like."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from homing.errors import ConfigError
from homing.tokenizer import Tokenizer
from tests.support.byte_model import BOS, EOS, byte_fallback, byte_id, byte_ids, byte_level


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return Tokenizer.from_dir(byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer, sentencepiece, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@given(ids=st.lists(st.integers(0, 264)))
def test_decode_agrees_with_the_tokenizers_library_on_any_bytes(directory, tokenizer, ids):
    reference = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_importing_the_package_does_not_import_torch_or_transformers():
    check = "import sys, homing.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_a_directory_without_a_tokenizer_is_a_one_line_error(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_broken_tokenizer_file_is_a_one_line_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


def test_control_tokens_in_a_text_are_single_ids_and_vanish_from_its_decoding(tokenizer):
    ids = tokenizer.encode("a<|eos|>b")
    assert ids == [byte_id(ord("a")), EOS, byte_id(ord("b"))]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|eos|>b"


def test_ids_outside_the_vocabulary_add_nothing_to_a_text(tokenizer):
    assert tokenizer.decode([byte_id(ord("a")), 10_000, -1, byte_id(ord("b"))]) == "ab"
    assert tokenizer.token_bytes(10_000) is None
    assert tokenizer.token_text(10_000) == "token_id:10000"


def test_a_token_reads_as_its_text_and_a_part_of_a_character_as_its_bytes(tokenizer):
    [merged] = tokenizer.encode(" w")
    assert tokenizer.token_text(merged) == " w"
    assert tokenizer.token_text(byte_id(0xF0)) == r"bytes:\xf0"
    assert tokenizer.token_bytes(byte_id(0xF0)) == b"\xf0"
    assert tokenizer.token_text(EOS) == "<|eos|>"


def test_a_sentencepiece_word_keeps_its_space_and_a_byte_token_is_a_byte(sentencepiece):
    [word] = sentencepiece.encode("h")
    assert sentencepiece.token_text(word) == " h"
    assert sentencepiece.token_bytes(byte_id(0xE2)) == b"\xe2"
    assert sentencepiece.decode(byte_ids("€")) == "€"


def test_the_bos_token_is_read_from_the_configuration(tmp_path):
    assert Tokenizer.from_dir(byte_level(tmp_path / "with")).bos_token_id == BOS
    assert Tokenizer.from_dir(byte_level(tmp_path / "without", bos=False)).bos_token_id is None


def test_the_bos_token_may_be_written_as_an_object_or_in_the_generation_config(tmp_path):
    directory = byte_level(tmp_path, bos=False)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}})
    )
    assert Tokenizer.from_dir(directory).bos_token_id == BOS
    (directory / "tokenizer_config.json").unlink()
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    assert Tokenizer.from_dir(directory).bos_token_id == 1


def test_truncation_and_padding_that_a_file_asks_for_are_off(tmp_path):
    directory = byte_level(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer.from_dir(directory).encode("abcdef") == byte_ids("abcdef")
    assert Tokenizer.from_dir(directory).encode("a") == byte_ids("a")


@given(text=st.text())
def test_the_bound_on_tokens_is_never_above_their_number(tokenizer, sentencepiece, text):
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert sentencepiece.fewest_tokens(text) <= len(sentencepiece.encode(text))


def test_threads_may_encode_and_decode_at_the_same_time(tokenizer):
    """Of the kind of "Already borrowed": 64 threads share one tokenizer."""
    texts = [f"hello {index} wörld" * (1 + index % 5) for index in range(256)]
    serial = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == serial
        assert list(pool.map(tokenizer.decode, serial)) == texts
