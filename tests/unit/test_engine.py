"""What an engine answers: how requests end, what is refused, scores, aborts, counters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from homing.engine.engine import Engine
from homing.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from homing.wire import FinishReason
from tests.support.byte_model import byte_ids, byte_level
from tests.support.engine_run import Answer, run
from tests.support.fake_model import EOS, expected_greedy, logits_of, make_engine

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0.0)


def answer(
    params: SamplingParams, prompt: list[int] | None = None, engine: Engine | None = None
) -> Answer:
    engine = engine or make_engine()[0]
    engine.add_request("r", np.array(prompt or PROMPT), params)
    return run(engine)["r"]


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]


# How requests end


def test_the_token_limit_ends_a_request_with_length():
    got = answer(greedy(num_tokens_to_generate=3, ignore_eos=True))
    assert len(got.token_ids) == 3
    assert got.finish is not None
    assert (got.finish.reason, got.finish.stop) == (FinishReason.LENGTH, None)


def test_an_end_of_sequence_id_ends_a_request_and_is_its_last_token():
    got = answer(GREEDY)
    assert got.token_ids == expected_greedy(PROMPT, 128)
    assert got.token_ids[-1] == EOS
    assert got.finish is not None
    assert (got.finish.reason, got.finish.stop) == (FinishReason.STOP, EOS)


def test_an_end_of_sequence_at_the_token_limit_is_a_stop():
    length = len(expected_greedy(PROMPT, 128))
    got = answer(greedy(num_tokens_to_generate=length))
    assert got.finish is not None
    assert got.finish.reason is FinishReason.STOP
    shorter = answer(greedy(num_tokens_to_generate=length - 1))
    assert shorter.finish is not None
    assert shorter.finish.reason is FinishReason.LENGTH


def test_a_stop_id_ends_a_request():
    third = expected_greedy(PROMPT, 3)[2]
    got = answer(greedy(stop_token_ids=(third,)))
    assert got.token_ids[-1] == third
    assert got.finish is not None
    assert (got.finish.reason, got.finish.stop) == (FinishReason.STOP, third)


def test_an_ignored_end_of_sequence_does_not_end_a_request():
    got = answer(greedy(ignore_eos=True, num_tokens_to_generate=60))
    assert EOS in got.token_ids[:-1]
    assert len(got.token_ids) == 60


def test_min_tokens_bars_the_end_of_sequence():
    natural = len(expected_greedy(PROMPT, 128))
    got = answer(greedy(min_tokens=natural + 5))
    assert len(got.token_ids) >= natural + 5
    assert EOS not in got.token_ids[: natural + 5]


def test_the_end_of_the_context_ends_a_request_with_length():
    engine, _ = make_engine(max_context_tokens=20, eos=())
    got = answer(GREEDY, engine=engine)
    assert len(got.token_ids) == 20 - len(PROMPT)
    assert got.finish is not None
    assert got.finish.reason is FinishReason.LENGTH


def test_a_prompt_one_token_short_of_the_context_gets_one_token():
    engine, _ = make_engine(max_context_tokens=6)
    assert len(answer(GREEDY, engine=engine).token_ids) == 1


# Stop words


class ByteEngine:
    """Answers each prompt with a text of the test's choice, one token a byte."""

    def __init__(self, tmp_path: Path, text: str) -> None:
        tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
        self.engine, model = make_engine(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
        script = byte_ids(text)

        def forward(batch: object, cache: object) -> torch.Tensor:
            positions = batch.positions[batch.selected].tolist()  # type: ignore[attr-defined]
            logits = torch.zeros(len(positions), tokenizer.vocab_size)
            for row, position in enumerate(positions):
                logits[row, script[position - len(PROMPT) + 1]] = 9.0
            return logits

        model.forward = forward  # type: ignore[method-assign]

    def answer(self, params: SamplingParams, *, received: str = "") -> Answer:
        resumed = byte_ids(received)
        self.engine.add_request("r", np.array(PROMPT + resumed), params, num_resumed=len(resumed))
        return run(self.engine)["r"]


def test_a_stop_word_ends_a_request_where_its_last_character_is_complete(tmp_path: Path):
    got = ByteEngine(tmp_path, "one 🌍END two").answer(greedy(stop_words=("🌍E", "zzz")))
    assert got.token_ids == byte_ids("one 🌍E")
    assert got.finish is not None
    assert (got.finish.reason, got.finish.stop) == (FinishReason.STOP, "🌍E")


def test_a_stop_word_that_began_in_an_earlier_attempt_is_found(tmp_path: Path):
    got = ByteEngine(tmp_path, "one END two").answer(greedy(stop_words=("END",)), received="one EN")
    assert got.token_ids == byte_ids("D")


def test_a_stop_word_that_an_earlier_attempt_completed_ends_a_request_at_once(tmp_path: Path):
    got = ByteEngine(tmp_path, "one END").answer(greedy(stop_words=("END",)), received="one END")
    assert got.token_ids == []
    assert got.finish is not None
    assert got.finish.stop == "END"


def test_a_stop_word_in_the_prompt_does_not_count(tmp_path: Path):
    engine = ByteEngine(tmp_path, "abcdefgh")
    engine.engine.add_request(
        "r",
        np.array(byte_ids("hello")),
        greedy(stop_words=("hello", "oab"), num_tokens_to_generate=4),
    )
    assert run(engine.engine)["r"].token_ids == byte_ids("abcd")


# Scores of the prompt


def prompt_scores(prompt: list[int]) -> list[float]:
    logits = [torch.from_numpy(logits_of(prompt[: i + 1], 32)) for i in range(len(prompt) - 1)]
    return [float(torch.log_softmax(x, -1)[t]) for x, t in zip(logits, prompt[1:], strict=True)]


@pytest.mark.parametrize("max_step_tokens", [1, 4, 7, 32])
def test_a_request_for_no_tokens_scores_its_prompt(max_step_tokens: int):
    engine, _ = make_engine(max_step_tokens=max_step_tokens, max_batch_requests=1)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    params = greedy(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
    got = answer(params, prompt, engine)
    assert got.token_ids == []
    assert got.finish is not None
    assert got.finish.reason is FinishReason.LENGTH
    assert got.prompt_log_probs is not None
    scores = [np.frombuffer(entry, np.float32)[0] for entry in got.prompt_log_probs]
    np.testing.assert_allclose(scores, prompt_scores(prompt), rtol=1e-6)


def test_a_prompt_that_fills_the_context_can_be_scored():
    engine, _ = make_engine(max_context_tokens=8)
    params = greedy(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
    got = answer(params, [3, 4, 5, 6, 7, 8, 9, 10], engine)
    assert got.prompt_log_probs is not None
    assert len(got.prompt_log_probs) == 7


def test_a_prompt_of_one_token_has_no_scores():
    params = greedy(num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
    assert answer(params, [5]).prompt_log_probs == []


def test_a_request_for_nothing_at_all_ends_at_once():
    engine, model = make_engine()
    got = answer(greedy(num_tokens_to_generate=0), engine=engine)
    assert got.finish is not None
    assert got.finish.reason is FinishReason.LENGTH
    assert model.num_rows_of_steps == []


def test_a_resumed_request_that_has_all_its_tokens_ends_at_once():
    engine, _ = make_engine()
    engine.add_request("r", np.array([5, 6, 7]), greedy(num_tokens_to_generate=2), num_resumed=2)
    [output] = engine.step()
    assert (output.token_ids, output.finish and output.finish.reason) == ([], FinishReason.LENGTH)


# What is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message", "field"),
    [
        ([], GREEDY, "the prompt has no tokens", "prompt"),
        ([3] * 128, GREEDY, "128 tokens; the model's maximum context length is 128", "prompt"),
        ([3, 32], GREEDY, "token id 32 is not in the vocabulary of 32", "prompt"),
        ([-1, 3], GREEDY, "token id -1 is not in the vocabulary", "prompt"),
        ([3], greedy(stop_token_ids=(99,)), "token id 99 in stop_token_ids", "stop_token_ids"),
        ([3], greedy(logit_bias={99: 1.0}), "token id 99 in logit_bias", "logit_bias"),
        ([3], greedy(stop_words=("x",)), "stop words need a tokenizer", "stop_words"),
        ([3], greedy(bad_words=("x",)), "bad words need a tokenizer", "bad_words"),
        ([3], greedy(allowed_token_ids=(1, 2**20)), "in allowed_token_ids", "allowed_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_else_is_disturbed(
    prompt: list[int], params: SamplingParams, message: str, field: str
):
    engine, _ = make_engine()
    engine.add_request("other", np.array(PROMPT), GREEDY)
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add_request("r", np.array(prompt, np.int64), params)
    assert caught.value.field == field
    assert list(run(engine)) == ["other"]


def test_a_prompt_that_is_too_long_is_told_apart():
    engine, _ = make_engine(max_context_tokens=16)
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        engine.add_request("r", np.full(40, 3), GREEDY)


def test_a_full_queue_refuses():
    engine, _ = make_engine(max_queued_requests=2)
    for name in "ab":
        engine.add_request(name, np.array(PROMPT), GREEDY)
    with pytest.raises(Overloaded, match="2 requests wait already"):
        engine.add_request("c", np.array(PROMPT), GREEDY)
    engine.step()  # now one of them runs
    engine.add_request("c", np.array(PROMPT), GREEDY)


# Aborts


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_request_ends_with_abort_and_returns_all_its_blocks(num_steps: int):
    engine, _ = make_engine(max_step_tokens=8, eos=())
    engine.add_request("r", np.arange(3, 15), GREEDY)
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    engine.abort("r")
    assert engine.has_work
    outputs += engine.step()
    assert [o.finish.reason for o in outputs if o.finish] == [FinishReason.ABORT]
    assert not engine.has_unfinished_requests
    assert engine.block_pool.num_held == 0


def test_an_abort_is_delivered_while_paused():
    engine, _ = make_engine()
    engine.add_request("r", np.array(PROMPT), GREEDY)
    engine.lifecycle.pause()
    engine.abort("r")
    assert engine.has_work
    [output] = engine.step()
    assert output.finish is not None
    assert not engine.has_work


def test_aborting_an_unknown_request_does_nothing():
    engine, _ = make_engine()
    engine.abort("nobody")
    assert not engine.has_work


# Counters


def test_counters_tell_what_was_computed():
    engine, _ = make_engine(eos=())
    params = greedy(num_tokens_to_generate=4)
    for _ in range(2):
        answer(params, list(range(3, 20)), engine)
    counters = engine.counters
    assert (counters.requests_started, counters.requests_finished) == (2, 2)
    assert counters.prompt_tokens == 34
    assert counters.cached_tokens == 16
    assert counters.prefilled_tokens == 34 - 16
    assert counters.prefilled_pairs == 17 * 17 // 2 + (17 * 17 - 16 * 16) // 2
    assert counters.generated_tokens == 8
    assert counters.decode_rows == 2 * 3
    assert counters.decode_context_tokens == 2 * (18 + 19 + 20)
    assert counters.steps == 8
    assert counters.prefill_step_s > 0
    assert counters.decode_step_s > 0


def test_another_cache_salt_shares_no_prefix():
    engine, _ = make_engine()
    prompt = np.arange(3, 23)
    hits = []
    for salt in ("", "tenant", "tenant"):
        engine.add_request("r", prompt, greedy(num_tokens_to_generate=1), cache_salt=salt)
        hits.append(run(engine)["r"].num_cached_tokens)
    assert hits == [0, 0, 19]


def test_a_step_that_fails_raises():
    engine, model = make_engine()
    engine.add_request("r", np.array(PROMPT), GREEDY)
    model.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
