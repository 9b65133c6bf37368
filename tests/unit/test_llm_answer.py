"""How an answer grows: its text, its deltas and its result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from homing.client import Part
from homing.errors import InvalidRequest, RequestLost
from homing.llm import Delta, Result, SamplingParams, Status
from homing.llm.answer import Answer
from homing.llm.prompts import Prompt
from homing.llm.text import TextCodec, TextHooks
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason
from tests.support.byte_model import BOS, EOS, byte_ids, byte_level

PROMPT = "Hi"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(byte_level(tmp_path_factory.mktemp("tokenizer")))


def grow(
    tokenizer: Tokenizer,
    parts: Iterable[Part],
    hooks: TextHooks | None = None,
    resumed: Result | None = None,
    **asked: Any,
) -> tuple[list[Delta], Result]:
    codec = TextCodec(tokenizer, hooks or TextHooks())
    prompt = Prompt(PROMPT, byte_ids(PROMPT), resumed)
    params = SamplingParams(**asked)
    answer = Answer(7, 2, prompt, params, params.for_engine(2), codec)
    deltas = [delta for part in parts if (delta := answer.push(part))]
    result = deltas[-1].result
    assert result is not None
    assert [delta.result for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return deltas, result


def parts_of(text: str | bytes, finish: Finish | None = None) -> list[Part]:
    """One part for each byte, then the end."""
    parts = [Part([token], epoch=3) for token in byte_ids(text)]
    return [*parts, Part([], finish=finish or Finish(FinishReason.LENGTH))]


def test_deltas_hold_whole_characters_and_join_to_the_text(tokenizer: Tokenizer) -> None:
    deltas, result = grow(tokenizer, parts_of("a🌍é"))
    assert [delta.text for delta in deltas] == ["a", "", "", "", "🌍", "", "é", ""]
    assert result.generated_text == "a🌍é"
    assert [token for delta in deltas for token in delta.tokens] == result.generated_tokens
    assert {delta.request_id for delta in deltas} == {7}
    assert {delta.index for delta in deltas} == {2}


def test_an_unfinished_character_at_the_end_is_shown_as_one_that_is_not_known(
    tokenizer: Tokenizer,
) -> None:
    _, result = grow(tokenizer, parts_of("é".encode()[:1]))
    assert result.generated_text == "�"


def test_a_stream_may_ask_for_fewer_and_larger_deltas(tokenizer: Tokenizer) -> None:
    deltas, result = grow(tokenizer, parts_of("abcdefgh"), streaming_interval=3)
    assert [delta.text for delta in deltas] == ["abc", "def", "gh"]
    assert result.generated_text == "abcdefgh"


def test_a_stop_word_is_cut_off_unless_asked_for(tokenizer: Tokenizer) -> None:
    ended = parts_of("one END", Finish(FinishReason.STOP, stop="END"))
    deltas, result = grow(tokenizer, ended, stop_words=("END",))
    assert result.generated_text == "one "
    assert "".join(delta.text for delta in deltas) == "one "
    assert (result.finish_reason, result.stop_reason) == ("stop", "END")
    assert result.generated_tokens == byte_ids("one END")
    _, result = grow(tokenizer, ended, stop_words=("END",), detokenize_stop_sequence=True)
    assert result.generated_text == "one END"


def test_the_id_that_ended_an_answer_is_no_part_of_its_text(tokenizer: Tokenizer) -> None:
    parts = [Part(byte_ids("ok")), Part(byte_ids("!"), finish=Finish(FinishReason.STOP, 38))]
    assert byte_ids("!") == [38]
    _, result = grow(tokenizer, parts, stop_token_ids=(38,))
    assert (result.generated_text, result.generated_tokens) == ("ok", byte_ids("ok!"))
    _, result = grow(tokenizer, parts, stop_token_ids=(38,), detokenize_stop_sequence=True)
    assert result.generated_text == "ok!"


def test_a_result_has_every_field(tokenizer: Tokenizer) -> None:
    first = Part(
        byte_ids("a"),
        log_probs=[-0.5],
        top=[[(102, -0.5), (103, -1.0)]],
        num_cached_tokens=1,
        prompt_log_probs=[None, -2.0],
        prompt_top=[None, [(110, -2.0)]],
        epoch=3,
    )
    last = Part(
        [EOS],
        log_probs=[-0.25],
        top=[[(EOS, -0.25)]],
        epoch=4,
        finish=Finish(FinishReason.STOP, EOS),
    )
    asked = {"return_log_probs": True, "top_n_logprobs": 2, "return_prompt_tokens": True, "seed": 5}
    deltas, result = grow(tokenizer, [first, last], **asked)
    assert (result.request_id, result.prompt, result.num_prompt_tokens) == (7, "Hi", 2)
    assert result.prompt_tokens == byte_ids("Hi")
    assert (result.generated_text, result.generated_tokens) == ("a", [*byte_ids("a"), EOS])
    assert result.prompt_log_probs == [None, -2.0]
    assert result.generated_log_probs == [-0.5, -0.25]
    assert result.prompt_top_n_logprobs == [None, [(110, -2.0)]]
    assert result.generated_top_n_logprobs == [[(102, -0.5), (103, -1.0)], [(EOS, -0.25)]]
    assert (result.finish_reason, result.stop_reason) == ("stop", EOS)
    assert (result.num_cached_tokens, result.token_epochs, result.seed) == (1, [3, 4], 5)
    assert (result.status, result.error) == (Status.COMPLETED, None)
    assert result.ttft is not None
    assert 0 <= result.ttft <= result.latency
    assert [delta.log_probs for delta in deltas] == [[-0.5], [-0.25]]
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]


def test_what_was_not_asked_for_is_none(tokenizer: Tokenizer) -> None:
    deltas, result = grow(tokenizer, parts_of("a"), detokenize_generations=False)
    assert result.generated_text is None
    assert result.prompt_tokens is None
    assert result.generated_log_probs is result.generated_top_n_logprobs is None
    assert result.prompt_log_probs is result.prompt_top_n_logprobs is None
    assert [(delta.text, delta.log_probs) for delta in deltas] == [("", None)] * 2


def test_an_aborted_answer_has_what_was_generated(tokenizer: Tokenizer) -> None:
    _, result = grow(tokenizer, parts_of("abc", Finish(FinishReason.ABORT)))
    assert (result.generated_text, result.status) == ("abc", Status.ABORTED)
    assert result.finish_reason == "abort"


def test_an_answer_that_is_resumed_goes_on_amid_a_character_and_a_stop_word(
    tokenizer: Tokenizer,
) -> None:
    begun = "é".encode() + b"\xc3"  # and half of another
    asked = {"stop_words": ("éND",), "return_log_probs": True}
    scored = [Part([token], [-1.0], epoch=1) for token in byte_ids(begun)]
    _, aborted = grow(tokenizer, [*scored, Part([], finish=Finish(FinishReason.ABORT))], **asked)
    assert aborted.generated_text == "é�"
    rest = [Part([token], [-2.0], epoch=2) for token in byte_ids(b"\xa9ND")]
    end = Part([], finish=Finish(FinishReason.STOP, "éND"))
    deltas, result = grow(tokenizer, [*rest, end], resumed=aborted, **asked)
    assert result.generated_text == "é"
    assert result.generated_tokens == byte_ids("ééND")
    assert result.generated_log_probs == [-1.0] * 3 + [-2.0] * 3
    assert result.token_epochs == [1] * 3 + [2] * 3
    assert [token for delta in deltas for token in delta.tokens] == byte_ids(b"\xa9ND")
    assert [delta.text for delta in deltas] == ["é", "", "", ""]


def test_an_answer_without_a_token_has_no_ttft(tokenizer: Tokenizer) -> None:
    _, result = grow(tokenizer, parts_of("", Finish(FinishReason.ABORT)))
    assert (result.ttft, result.generated_tokens, result.token_epochs) == (None, [], [])


def test_a_failed_answer_says_why(tokenizer: Tokenizer) -> None:
    codec = TextCodec(tokenizer, TextHooks())
    params = SamplingParams()
    answer = Answer(1, 0, Prompt(None, [9]), params, params.for_engine(1), codec)
    answer.push(Part(byte_ids("ab")))
    delta = answer.fail(error := RequestLost("3 engines were lost"))
    assert delta.result is not None
    assert (delta.result.status, delta.result.error) == (Status.FAILED, error)
    assert (delta.result.generated_text, delta.finish_reason) == ("ab", "error")


def test_ones_own_detokenizer_sees_all_tokens_and_shows_what_it_appends(
    tokenizer: Tokenizer,
) -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def shout(prompt: list[int], generated: list[int]) -> str:
        calls.append((prompt, generated))
        return tokenizer.decode(generated).upper()

    hooks = TextHooks(detokenize_generations=shout)
    deltas, result = grow(tokenizer, parts_of("aé"), hooks)
    assert [delta.text for delta in deltas] == ["A", "", "É", ""]
    assert result.generated_text == "AÉ"
    assert calls[-1] == (byte_ids("Hi"), byte_ids("aé"))


def test_ones_own_tokenizer_takes_the_place_of_the_models(tokenizer: Tokenizer) -> None:
    codec = TextCodec(tokenizer, TextHooks(tokenize_prompt=lambda text: [len(text)]))
    assert codec.encode("four", SamplingParams()) == [4]
    assert codec.encode("four", SamplingParams(add_BOS=True)) == [BOS, 4]


def test_a_prompt_begins_with_one_bos_if_asked_and_an_empty_one_always_does(
    tokenizer: Tokenizer,
) -> None:
    codec = TextCodec(tokenizer, TextHooks())
    assert codec.encode("a", SamplingParams()) == byte_ids("a")
    assert codec.encode("a", SamplingParams(add_BOS=True)) == [BOS, *byte_ids("a")]
    assert codec.encode("<|bos|>a", SamplingParams(add_BOS=True)) == [BOS, *byte_ids("a")]
    assert codec.encode("", SamplingParams()) == [BOS]


def test_a_model_without_bos_cannot_be_asked_for_it(tmp_path: Path) -> None:
    codec = TextCodec(Tokenizer.from_dir(byte_level(tmp_path, bos=False)), TextHooks())
    with pytest.raises(InvalidRequest, match="this model knows no BOS token"):
        codec.encode("a", SamplingParams(add_BOS=True))
