"""From parts of tokens to pieces of text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.client import Part
from homing.frontend.text import ChoiceText, Piece, join
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason
from tests.support.byte_model import EOS, byte_id, byte_ids, byte_level
from tests.support.fake_fleet import LENGTH, STOP, parts

LOGGED = SamplingParams(return_log_probs=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(byte_level(tmp_path_factory.mktemp("tokenizer")))


def run(tokenizer, params, answer, *, prompt=(), echo=None, finish=STOP) -> list[Any]:
    """What each token brings: a piece, or None."""
    choice = ChoiceText(tokenizer, prompt, params, echo=echo)
    return [choice.push(part) for part in parts(prompt, params, answer, finish=finish)]


def texts(pieces):
    return [piece and piece.text for piece in pieces]


def test_an_emoji_of_four_tokens_comes_with_its_last_token(tokenizer):
    pieces = run(tokenizer, SamplingParams(), byte_ids("😀"))
    assert texts(pieces) == [None, None, None, "😀"]


def test_tokens_wait_for_their_text_and_then_come_together(tokenizer):
    pieces = run(tokenizer, LOGGED, byte_ids("é!"))
    assert pieces[0] is None
    assert [token.token_id for token in pieces[1].tokens] == byte_ids("é")
    assert [token.token_id for token in pieces[2].tokens] == byte_ids("!")


def test_a_token_that_ends_the_answer_is_counted_and_not_shown(tokenizer):
    finish = Finish(FinishReason.STOP, stop=byte_id(ord("!")))
    whole = join(run(tokenizer, SamplingParams(), byte_ids("hi!"), finish=finish))
    assert whole.text == "hi"
    assert len(whole.tokens) == 3
    assert whole.finish_reason == "stop"
    assert whole.stop_reason is None  # the model's own end of sequence


def test_a_stop_id_that_the_request_named_is_the_stop_reason_and_shown_on_request(tokenizer):
    bang = byte_id(ord("!"))
    params = SamplingParams(stop_token_ids=(bang,), detokenize_stop_sequence=True)
    finish = Finish(FinishReason.STOP, stop=bang)
    whole = join(run(tokenizer, params, byte_ids("hi!"), finish=finish))
    assert (whole.text, whole.stop_reason) == ("hi!", bang)


def test_nothing_of_a_stop_word_is_shown(tokenizer):
    params = SamplingParams(stop_words=("END",))
    finish = Finish(FinishReason.STOP, stop="END")
    pieces = run(tokenizer, params, byte_ids("aEND"), finish=finish)
    assert texts(pieces) == ["a", None, None, ""]
    assert pieces[-1].stop_reason == "END"


def test_what_was_held_back_comes_once_when_it_is_no_stop_word(tokenizer):
    params = SamplingParams(stop_words=("END",))
    assert texts(run(tokenizer, params, byte_ids("ENX"))) == [None, None, "ENX"]


def test_what_is_held_when_the_limit_is_reached_is_shown(tokenizer):
    params = SamplingParams(stop_words=("END",))
    whole = join(filter(None, run(tokenizer, params, byte_ids("aEN"), finish=LENGTH)))
    assert (whole.text, whole.finish_reason) == ("aEN", "length")


def test_tokens_that_a_stop_word_swallowed_lie_at_the_end_of_the_text(tokenizer):
    params = SamplingParams(stop_words=("END",), return_log_probs=True)
    finish = Finish(FinishReason.STOP, stop="END")
    whole = join(filter(None, run(tokenizer, params, byte_ids("aEND"), finish=finish)))
    assert [token.text_offset for token in whole.tokens] == [0, 1, 1, 1]


def test_an_answer_of_no_tokens_ends_with_an_empty_piece(tokenizer):
    choice = ChoiceText(tokenizer, [], SamplingParams())
    piece = choice.push(Part(token_ids=[], finish=Finish(FinishReason.ABORT)))
    assert piece == Piece(finish_reason="abort")


def test_control_tokens_are_not_text(tokenizer):
    assert join(run(tokenizer, SamplingParams(), [EOS, byte_id(97)])[1:]).text == "a"


def test_offsets_count_characters_and_start_at_0_with_echo_and_without(tokenizer):
    prompt = byte_ids("hé")
    params = SamplingParams(return_log_probs=True, skip_prompt_log_probs=False)
    whole = join(filter(None, run(tokenizer, params, byte_ids("é!"), prompt=prompt, echo="hé")))
    assert whole.text == "héé!"
    assert [token.text_offset for token in whole.prompt_tokens or ()] == [0, 1, 1]
    assert [token.text_offset for token in whole.tokens] == [2, 2, 3]
    alone = join(filter(None, run(tokenizer, LOGGED, byte_ids("é!"), prompt=prompt)))
    assert [token.text_offset for token in alone.tokens] == [0, 0, 1]


def test_a_character_that_the_prompt_began_belongs_to_the_answer(tokenizer):
    first, second = byte_ids("é")
    assert join(run(tokenizer, SamplingParams(), [second], prompt=[first])).text == "é"


@given(
    answer=st.lists(st.integers(5, 260), min_size=1, max_size=30),
    words=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    logged=st.booleans(),
    cuts=st.lists(st.integers(1, 4)),
)
def test_the_cuts_between_parts_change_nothing(tokenizer, answer, words, logged, cuts):
    params = SamplingParams(stop_words=tuple(words), return_log_probs=logged)
    whole = ChoiceText(tokenizer, [], params)
    scores = [-1.0] * len(answer) if logged else None
    expected: Any = whole.push(Part(token_ids=answer, log_probs=scores, finish=STOP))
    choice = ChoiceText(tokenizer, [], params)
    pieces, rest = [], answer
    for cut in cuts:
        if len(rest) > cut:
            part = Part(token_ids=rest[:cut], log_probs=[-1.0] * cut if logged else None)
            pieces.append(choice.push(part))
            rest = rest[cut:]
    last = Part(token_ids=rest, log_probs=[-1.0] * len(rest) if logged else None, finish=STOP)
    joined = join(filter(None, [*pieces, choice.push(last)]))
    assert joined.text == expected.text
    assert [token.token_id for token in joined.tokens] == answer
    if logged:
        assert joined.tokens == expected.tokens
