"""Structured output inside the engine: in mixed batches, through preemption and resubmission.

The model's logits are random, so what it answers fits by the grammar alone.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from homing.engine.engine import Engine
from homing.engine.structured import grammar as grammar_module
from homing.engine.structured.compiler import GrammarCompiler
from homing.engine.structured.grammar import CompiledGrammar
from homing.errors import InvalidRequest
from homing.params import Choice, JsonSchema, Regex, SamplingParams, StructuredOutput
from homing.tokenizer import Tokenizer
from homing.wire import Finish, FinishReason
from tests.support.byte_model import EOS, byte_id, byte_ids, byte_level
from tests.support.engine_run import Answer, run
from tests.support.fake_model import logits_of, make_engine
from tests.support.structured import DEFINITIONS, check_fits

VOCAB_SIZE = 280
"""More than the tokenizer's 265."""
MAX_TOKENS = 400
PROMPT = np.array(byte_ids("Answer:"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_dir(byte_level(tmp_path_factory.getbasetemp() / "engine-tokenizer"))


@pytest.fixture(scope="module")
def grammars(tokenizer, tmp_path_factory) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(
        tmp_path_factory.getbasetemp() / "engine-tokenizer", VOCAB_SIZE, (EOS,)
    )
    yield compiler
    compiler.close()


def engine_of(grammars: GrammarCompiler | None, **options: Any) -> Engine:
    defaults = {"num_blocks": 400, "max_context_tokens": 600, "max_step_tokens": 64, "eos": (EOS,)}
    engine, _ = make_engine(vocab_size=VOCAB_SIZE, grammars=grammars, **(defaults | options))
    return engine


def params_of(definition: StructuredOutput | None, seed: int = 1, **options: Any) -> SamplingParams:
    defaults = {"num_tokens_to_generate": MAX_TOKENS, "temperature": 1.5}
    return SamplingParams(structured_output=definition, seed=seed, **(defaults | options))


def run_all(engine: Engine) -> dict[Hashable, Answer]:
    """Run until every request is answered, waiting for grammars where nothing else is to do."""
    ready = threading.Event()
    engine.wake = ready.set
    answers: dict[Hashable, Answer] = {}
    while engine.has_unfinished_requests or engine.has_work:
        ready.clear()
        if not engine.has_work:
            assert ready.wait(30)
        run(engine, answers)
    return answers


def answer_to(grammars: GrammarCompiler, params: SamplingParams) -> Answer:
    engine = engine_of(grammars)
    engine.add_request("alone", PROMPT, params)
    return run_all(engine)["alone"]


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    assert answer.finish == Finish(FinishReason.STOP, stop=EOS)
    assert answer.token_ids[-1] == EOS
    return tokenizer.to_bytes(answer.token_ids[:-1]).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=["greedy", "sampled"])
def test_a_batch_of_many_grammars_and_none_answers_each_as_if_alone(
    tokenizer, grammars, temperature
):
    engine = engine_of(grammars, max_batch_requests=40, max_step_tokens=100)
    plain = engine_of(None)
    for number, (name, definition) in enumerate(DEFINITIONS.items()):
        engine.add_request(name, PROMPT, params_of(definition, number, temperature=temperature))
        free = params_of(None, number, num_tokens_to_generate=40)
        for each in (engine, plain):
            each.add_request(number, PROMPT, free)
    answers = run_all(engine)
    for number, answer in run_all(plain).items():
        assert answers[number].token_ids == answer.token_ids
    for number, (name, definition) in enumerate(DEFINITIONS.items()):
        check_fits(name, text_of(tokenizer, answers[name]))
        alone = answer_to(grammars, params_of(definition, number, temperature=temperature))
        assert answers[name].token_ids == alone.token_ids


def test_a_preempted_answer_is_what_it_would_have_been(tokenizer, grammars):
    engine = engine_of(grammars, num_blocks=40, max_context_tokens=150, max_step_tokens=16)
    definitions = {name: d for name, d in DEFINITIONS.items() if name not in ("strings", "enums")}
    for number, definition in enumerate(definitions.values()):
        params = params_of(definition, number, num_tokens_to_generate=140)
        engine.add_request(number, PROMPT, params)
    answers = run_all(engine)
    assert engine.counters.preemptions > 3
    for number, definition in enumerate(definitions.values()):
        params = params_of(definition, number, num_tokens_to_generate=140)
        assert answers[number].token_ids == answer_to(grammars, params).token_ids


@pytest.mark.parametrize("name", ["nested objects", "choice", "gbnf"])
def test_a_resubmitted_answer_goes_on_where_it_was(grammars, name):
    params = params_of(DEFINITIONS[name], seed=3)
    whole = answer_to(grammars, params).token_ids
    engine = engine_of(grammars, num_blocks=2000, max_queued_requests=1000)
    cuts = range(0, len(whole), 7 if len(whole) > 40 else 1)
    for cut in cuts:
        engine.add_request(cut, np.array([*PROMPT, *whole[:cut]]), params, num_resumed=cut)
    answers = run_all(engine)
    for cut in cuts:
        assert whole[:cut] + answers[cut].token_ids == whole
        assert answers[cut].finish == Finish(FinishReason.STOP, stop=EOS)


def test_an_answer_that_was_complete_when_its_engine_died_is_not_gone_on_with(grammars):
    params = params_of(Choice(("yes",)))
    whole = [*byte_ids("yes"), EOS]
    engine = engine_of(grammars)
    engine.add_request(1, np.array([*PROMPT, *whole]), params, num_resumed=len(whole))
    assert run_all(engine)[1].finish == Finish(FinishReason.STOP, stop=EOS)


def test_an_answer_that_cannot_be_that_of_its_grammar_is_not_resumed(grammars):
    engine = engine_of(grammars)
    resumed = byte_ids("no")
    params = params_of(Choice(("yes",)))
    engine.add_request(1, np.array([*PROMPT, *resumed]), params, num_resumed=len(resumed))
    finish = run_all(engine)[1].finish
    assert finish is not None
    assert (finish.reason, finish.field) == (FinishReason.ERROR, "structured_output")


# While a grammar is compiled


class SlowCompiler(GrammarCompiler):
    """Done when a test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[CompiledGrammar]] = []

    def compile(self, definition: StructuredOutput) -> Future[CompiledGrammar]:
        self.futures.append(Future())
        return self.futures[-1]


def test_requests_do_not_wait_for_the_grammar_of_another(tokenizer, grammars):
    compiler = SlowCompiler()
    engine = engine_of(compiler)
    woken = threading.Event()
    engine.wake = woken.set
    engine.add_request("slow", PROMPT, params_of(Choice(("yes",))))
    assert not engine.has_work
    engine.add_request("free", PROMPT, params_of(None, num_tokens_to_generate=20))
    answers = run(engine)
    assert set(answers) == {"free"}
    assert not engine.has_work
    assert not woken.is_set()

    compiler.futures[0].set_result(grammars.compile(Choice(("yes",))).result())
    assert woken.is_set()
    assert engine.has_work
    assert text_of(tokenizer, run(engine, answers)["slow"]) == "yes"


def test_a_request_can_be_aborted_before_its_grammar_is_there(grammars):
    compiler = SlowCompiler()
    engine = engine_of(compiler)
    engine.add_request(1, PROMPT, params_of(Choice(("yes",))))
    engine.abort(1)
    assert run(engine)[1].finish == Finish(FinishReason.ABORT)
    compiler.futures[0].set_result(grammars.compile(Choice(("yes",))).result())
    assert not engine.has_work


def test_a_paused_engine_takes_grammars_and_starts_nothing(tokenizer, grammars):
    engine = engine_of(grammars)
    engine.lifecycle.pause()
    grammars.compile(Choice(("yes",))).result()
    engine.add_request(1, PROMPT, params_of(Choice(("yes",))))
    assert not engine.has_work
    engine.lifecycle.unpause()
    assert text_of(tokenizer, run_all(engine)[1]) == "yes"


# Errors end one request


def test_a_definition_that_cannot_be_honoured_is_answered_with_the_reason(grammars):
    engine = engine_of(grammars)
    engine.add_request("bad", PROMPT, params_of(JsonSchema('{"not": {}}')))
    engine.add_request("free", PROMPT, params_of(None, num_tokens_to_generate=5, ignore_eos=True))
    answers = run_all(engine)
    finish = answers["bad"].finish
    assert finish is not None
    assert (finish.reason, finish.field) == (FinishReason.ERROR, "structured_output")
    assert "not" in finish.detail
    assert answers["bad"].token_ids == []
    assert len(answers["free"].token_ids) == 5


def test_a_fault_of_the_compiler_ends_the_request_and_not_the_engine(caplog):
    compiler = SlowCompiler()
    engine = engine_of(compiler)
    engine.add_request(1, PROMPT, params_of(Choice(("yes",))))
    compiler.futures[0].set_exception(MemoryError())
    finish = run(engine)[1].finish
    assert finish is not None
    assert (finish.reason, finish.field) == (FinishReason.ERROR, "")
    assert "could not be compiled" in caplog.text


def test_a_grammar_that_takes_too_long_for_a_token_ends_its_own_request_alone(
    grammars, monkeypatch
):
    engine = engine_of(grammars)
    grammars.compile(DEFINITIONS["arrays"]).result()
    monkeypatch.setattr(grammar_module, "MAX_MASK_S", 0.0)
    engine.add_request("costly", PROMPT, params_of(DEFINITIONS["arrays"]))
    engine.add_request("free", PROMPT, params_of(None, num_tokens_to_generate=5, ignore_eos=True))
    answers = run_all(engine)
    finish = answers["costly"].finish
    assert finish is not None
    assert (finish.reason, finish.field) == (FinishReason.ERROR, "structured_output")
    assert "for one token" in finish.detail
    assert len(answers["free"].token_ids) == 5


def test_an_engine_without_a_tokenizer_refuses_structured_output():
    with pytest.raises(InvalidRequest, match="needs a tokenizer") as caught:
        engine_of(None).add_request(1, PROMPT, params_of(Choice(("yes",))))
    assert caught.value.field == "structured_output"


# Beside the other parameters


def test_log_probs_stay_those_of_the_model(grammars):
    params = params_of(DEFINITIONS["numbers"], return_log_probs=True, top_n_logprobs=3)
    answer = answer_to(grammars, params)
    tokens = [*PROMPT]
    for token, scores in zip(answer.token_ids, answer.log_probs, strict=True):
        logits = logits_of(tokens, VOCAB_SIZE).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        chosen, *top = np.frombuffer(scores[:4] + scores[-12:], np.float32)
        assert chosen == pytest.approx(expected[token], abs=1e-4)
        assert top == pytest.approx(np.sort(expected)[:-4:-1], abs=1e-4)
        tokens.append(token)


def test_an_answer_is_only_as_long_as_its_limit(grammars):
    params = params_of(Regex("a{50}"), num_tokens_to_generate=7)
    answer = answer_to(grammars, params)
    assert answer.token_ids == byte_ids("a" * 7)
    assert answer.finish == Finish(FinishReason.LENGTH)


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_eos": True},
        {"min_tokens": 20},
        {"logit_bias": {byte_id(ord("e")): -100.0, EOS: -100.0}},
        {"repetition_penalty": 5.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"top_k": 1, "top_p": 0.1, "min_p": 0.9},
    ],
    ids=["ignore_eos", "min_tokens", "logit_bias", "penalties", "truncation"],
)
def test_no_other_parameter_leads_out_of_the_grammar(tokenizer, grammars, options):
    answer = answer_to(grammars, params_of(Choice(("yes", "yeees")), **options))
    assert text_of(tokenizer, answer) in ("yes", "yeees")


def test_bias_and_minimum_length_choose_among_what_fits(tokenizer, grammars):
    definition = Choice(("no", "yes", "yes, indeed"))
    bias = {byte_id(ord("n")): -100.0}
    for seed in range(5):
        params = params_of(definition, seed, logit_bias=bias, min_tokens=5)
        assert text_of(tokenizer, answer_to(grammars, params)) == "yes, indeed"


def test_a_stop_word_ends_an_answer_within_its_grammar(tokenizer, grammars):
    engine, _ = make_engine(
        vocab_size=VOCAB_SIZE, eos=(EOS,), tokenizer=tokenizer, grammars=grammars
    )
    params = params_of(Regex("a{4}b{20}"), stop_words=("ab",), num_tokens_to_generate=30)
    engine.add_request(1, PROMPT, params)
    answer = run_all(engine)[1]
    assert answer.token_ids == byte_ids("aaaab")
    assert answer.finish == Finish(FinishReason.STOP, stop="ab")
