"""Text that grows token by token."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.tokenizer import IncrementalDecoder, Tokenizer
from tests.support.byte_model import BOS, byte_fallback, byte_id, byte_ids, byte_level


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda kind: kind.__name__)
def tokenizer(request, tmp_path_factory):
    return Tokenizer.from_dir(request.param(tmp_path_factory.mktemp("tokenizer")))


def decode_pieces(tokenizer, prompt, ids):
    decoder = IncrementalDecoder(tokenizer, prompt)
    return [*(decoder.push([token]) for token in ids), decoder.finish()]


def test_an_emoji_comes_out_whole_with_its_last_byte(tokenizer):
    assert decode_pieces(tokenizer, [], byte_ids("😀!")) == ["", "", "", "😀", "!", ""]


def test_a_character_that_is_never_finished_is_one_replacement_character(tokenizer):
    assert decode_pieces(tokenizer, [], byte_ids("😀")[:3]) == ["", "", "", "�"]


def test_a_prompt_that_breaks_off_inside_a_character_lends_its_bytes_to_the_answer(tokenizer):
    first, *rest = byte_ids("é!")
    assert decode_pieces(tokenizer, [*byte_ids("caf"), first], rest) == ["é", "!", ""]


def test_a_control_token_between_the_bytes_of_a_character_does_not_break_it(tokenizer):
    first, second = byte_ids("é")
    assert decode_pieces(tokenizer, [], [first, BOS, second]) == ["", "", "é", ""]


@given(
    prompt=st.lists(st.integers(0, 264), max_size=6),
    ids=st.lists(st.integers(0, 264)),
    cuts=st.lists(st.integers(1, 5)),
)
def test_pieces_join_to_the_decoding_of_prompt_and_answer(tokenizer, prompt, ids, cuts):
    decoder = IncrementalDecoder(tokenizer, prompt)
    whole = IncrementalDecoder(tokenizer, [])
    before = whole.push(prompt)
    pieces, rest = [], ids
    for cut in cuts:
        pieces.append(decoder.push(rest[:cut]))
        rest = rest[cut:]
    pieces += [decoder.push(rest), decoder.finish()]
    assert before + "".join(pieces) == tokenizer.decode([*prompt, *ids])


@given(text=st.text())
def test_valid_text_never_shows_a_replacement_character_on_its_way(tokenizer, text):
    for piece in decode_pieces(tokenizer, [], byte_ids(text)):
        assert ("�" in piece) <= ("�" in text)


def test_the_space_that_spells_the_first_word_is_dropped_only_at_the_start(tmp_path):
    tokenizer = Tokenizer.from_dir(byte_fallback(tmp_path))
    [word] = tokenizer.encode("h")
    assert decode_pieces(tokenizer, [BOS], [word, word]) == ["h", " h", ""]
    assert decode_pieces(tokenizer, [BOS, word], [word]) == [" h", ""]


def test_endless_invalid_bytes_take_constant_time_each(tokenizer):
    """A decoder that looks back to the last valid character takes quadratic time: minutes here."""
    decoder = IncrementalDecoder(tokenizer, [])
    start = time.monotonic()
    pieces = [decoder.push([byte_id(0x80)]) for _ in range(100_000)]
    assert time.monotonic() - start < 10
    assert "".join(pieces) == "�" * 100_000
