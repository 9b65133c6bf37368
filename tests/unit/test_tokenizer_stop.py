"""Stop words in text that arrives in pieces."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from homing.tokenizer import StopMatcher


def run(words, pieces, *, include=False):
    matcher = StopMatcher(words, include=include)
    sent = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.finish()], None


def test_nothing_of_a_stop_word_is_sent_though_it_comes_letter_by_letter():
    assert run(["END"], ["say ", "E", "N", "D"]) == (["say ", "", "", ""], "END")


def test_what_turns_out_to_be_no_stop_word_is_sent_at_once_and_whole():
    assert run(["END"], ["E", "N", "X"]) == (["", "", "ENX", ""], None)


def test_what_is_held_when_the_answer_ends_comes_with_finish():
    assert run(["END"], ["E", "N"]) == (["", "", "EN"], None)


def test_a_longer_start_gives_way_to_a_shorter_one_inside_it():
    assert run(["ababc"], ["abab", "abc", "x"]) == (["", "ab"], "ababc")


def test_the_word_that_is_complete_first_wins():
    assert run(["abcX", "bc"], ["abc", "X"]) == (["a"], "bc")


def test_of_words_complete_at_the_same_character_the_longest_wins():
    assert run(["bc", "abc"], ["xab", "c"]) == (["x", ""], "abc")


def test_an_included_stop_word_is_sent_and_nothing_after_it():
    assert run(["END"], ["say E", "ND of"], include=True) == (["say E", "ND"], "END")


def test_after_a_stop_word_nothing_more_comes_out():
    matcher = StopMatcher(["END"], include=False)
    assert matcher.push("END of") == ("", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.finish() == ""


def test_without_stop_words_text_passes():
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


words = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(words=words, pieces=st.lists(st.text("abc", max_size=4)), include=st.booleans())
def test_the_answer_is_that_of_a_search_in_the_whole_text(words, pieces, include):
    text = "".join(pieces)
    ends = sorted((text.find(word) + len(word), -len(word), word) for word in words if word in text)
    expected, stop = text, None
    if ends:
        end, _, stop = ends[0]
        expected = text[: end if include else end - len(stop)]
    sent, found = run(words, pieces, include=include)
    assert ("".join(sent), found) == (expected, stop)


def test_long_repetitive_stop_words_cost_linear_time():
    matcher = StopMatcher(["a" * 20_000 + "b"], include=False)
    start = time.monotonic()
    for _ in range(100_000):
        matcher.push("aa")
    assert time.monotonic() - start < 10
