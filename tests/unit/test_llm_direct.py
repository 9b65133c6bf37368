"""Direct mode: `LLM` on a tiny model in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.llm import LLM, AsyncLLM, SamplingParams, ServeConfig, Status
from homing.params import Choice, Regex
from tests.support.reference import greedy_tokens, reference_model
from tests.support.tiny_llm import PROMPTS, SMALL, greedy
from tests.support.tiny_models import make_tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, engine_config=SMALL) as llm:
        yield llm


def test_greedy_tokens_are_those_of_transformers(llm: LLM, model: Path) -> None:
    results = llm.generate(PROMPTS, greedy(return_prompt_tokens=True))
    for result in results:
        assert result.prompt_tokens is not None
        assert result.generated_tokens == greedy_tokens(model, result.prompt_tokens, 12)
    assert [result.prompt for result in results] == [PROMPTS[0], None, *PROMPTS[2:]]


def test_a_single_prompt_gives_a_list_of_one(llm: LLM) -> None:
    [of_text] = llm.generate("The capital of France is", greedy())
    [of_tokens] = llm.generate([5, 6, 7], greedy())
    both = llm.generate(PROMPTS[:2], greedy())
    assert [r.generated_tokens for r in both] == [
        of_text.generated_tokens,
        of_tokens.generated_tokens,
    ]
    assert llm.generate([]) == []


def test_more_prompts_than_run_at_a_time_all_end_in_order(llm: LLM) -> None:
    prompts = [[5 + n % 200, 6, 7] for n in range(60)]
    results = llm.generate(prompts, greedy(3, return_prompt_tokens=True))
    assert [result.prompt_tokens for result in results] == prompts


def test_streams_join_to_what_generate_gives(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, greedy())
    texts = [""] * len(PROMPTS)
    for delta in llm.stream(PROMPTS, greedy()):
        texts[delta.index] += delta.text
    assert texts == [result.generated_text for result in whole]


def test_streams_and_batches_may_overlap(llm: LLM) -> None:
    [alone] = llm.generate(PROMPTS[0], greedy(30))
    stream = llm.stream(PROMPTS[0], greedy(30))
    texts = [next(stream).text]
    [between] = llm.generate(PROMPTS[0], greedy(30))
    texts += [delta.text for delta in stream]
    assert between.generated_text == "".join(texts) == alone.generated_text


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], greedy(400))
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not llm.engine.core.has_unfinished_requests


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    results = llm.generate([[5, 6, 7]] * 3, [greedy(2), greedy(5), greedy(0)])
    assert [len(result.generated_tokens) for result in results] == [2, 5, 0]


def test_seeds_decide_samples(llm: LLM) -> None:
    group = [SamplingParams(num_tokens_to_generate=20, seed=n // 2) for n in range(4)]
    first, again, other, _ = llm.generate(["Once"] * 4, group)
    assert first.generated_tokens == again.generated_tokens != other.generated_tokens


def test_totals_and_termination_ids_are_settled_here(llm: LLM) -> None:
    [result] = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, num_tokens_total=8))
    assert len(result.generated_tokens) == 5
    third = result.generated_tokens[2]
    [result] = llm.generate([5, 6, 7], greedy(termination_id=third))
    assert (result.finish_reason, result.stop_reason) == ("stop", third)
    assert result.generated_tokens[-1] == third


def test_log_probs_of_prompt_and_answer(llm: LLM, model: Path) -> None:
    asked = greedy(4, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=2)
    [result] = llm.generate([5, 6, 7], asked)
    tokens = [5, 6, 7, *result.generated_tokens]
    logits = reference_model(model)(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits, -1)[range(6), tokens[1:]].tolist()
    assert result.prompt_log_probs is not None
    assert result.generated_log_probs is not None
    assert result.prompt_log_probs[0] is None
    got = [*result.prompt_log_probs[1:], *result.generated_log_probs]
    assert got == pytest.approx(expected, abs=1e-4)
    assert result.generated_top_n_logprobs is not None
    assert [top[0][0] for top in result.generated_top_n_logprobs] == result.generated_tokens
    assert {len(top) for top in result.generated_top_n_logprobs} == {2}


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([[5], [5] * 600], None, ContextLengthExceeded, "the prompt has 600 tokens"),
        ([[5], [320]], None, InvalidRequest, "token id 320 is not in the vocabulary of 320"),
        ([[5], []], None, InvalidRequest, "the prompt has no tokens"),
        ([[5]], greedy(600), ContextLengthExceeded, "has 1 tokens and 600 to generate"),
    ],
)
def test_what_cannot_be_served_is_a_value_error_before_anything_starts(
    llm: LLM, prompts: list[list[int]], params: Any, error: type[ValueError], message: str
) -> None:
    started = llm.engine.core.counters.requests_started
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)
    assert llm.engine.core.counters.requests_started == started


def test_media_for_a_model_that_takes_none_is_a_value_error(llm: LLM) -> None:
    message = "the model tiny-llama takes no media: multi_modal_data must be None"
    with pytest.raises(ValueError, match=message):
        llm.generate("What is it?", multi_modal_data={"image": b"pixels"})
    with pytest.raises(ValueError, match=message):
        next(llm.stream("What is it?", multi_modal_data=[]))
    assert llm.generate([5], greedy(1), multi_modal_data=None)


def test_an_error_that_ends_a_request_is_raised_or_returned(llm: LLM) -> None:
    wrong = greedy(structured_output=Regex("(?=a)b"))
    with pytest.raises(InvalidRequest, match="structured output"):
        llm.generate(["a", "b"], [greedy(), wrong])
    fine, failed = llm.generate(["a", "b"], [greedy(), wrong], raise_errors=False)
    assert (fine.status, fine.error) == (Status.COMPLETED, None)
    assert (failed.status, failed.finish_reason) == (Status.FAILED, "error")
    assert isinstance(failed.error, InvalidRequest)
    with pytest.raises(InvalidRequest):
        list(llm.stream("b", wrong))


def test_structured_output_is_waited_for(llm: LLM) -> None:
    [result] = llm.generate("Yes or no?", greedy(structured_output=Choice(("yes", "no"))))
    assert result.generated_text in ("yes", "no")


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def main() -> list[int]:
        [result] = llm.generate([5, 6, 7], greedy())
        return result.generated_tokens

    [outside] = llm.generate([5, 6, 7], greedy())
    assert asyncio.run(main()) == outside.generated_tokens


def test_threads_may_share_it(llm: LLM) -> None:
    expected = [result.generated_tokens for result in llm.generate(PROMPTS, greedy())]
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        [got[number]] = [r.generated_tokens for r in llm.generate([PROMPTS[number]], greedy())]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[number] for number in range(len(PROMPTS))] == expected


def test_a_request_can_be_aborted_from_another_thread(llm: LLM) -> None:
    deltas = llm.stream(PROMPTS[0], greedy(400))
    first = next(deltas)
    thread = threading.Thread(target=llm.abort, args=([first.request_id],))
    thread.start()
    thread.join()
    *_, last = deltas
    assert last.result is not None
    assert last.result.status is Status.ABORTED
    assert 1 <= len(last.result.generated_tokens) < 400


def test_an_aborted_result_is_a_prompt_that_goes_on(llm: LLM) -> None:
    asked = SamplingParams(
        num_tokens_to_generate=40,
        seed=3,
        return_prompt_tokens=True,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        top_n_logprobs=2,
    )
    [whole] = llm.generate("Once upon a time", asked)
    unseeded = msgspec.structs.replace(asked, seed=None)
    deltas = llm.stream("Once upon a time", asked)
    first = next(deltas)
    llm.abort([first.request_id])
    *_, last = deltas
    aborted = last.result
    assert aborted is not None
    assert 1 <= len(aborted.generated_tokens) < 40
    [resumed] = llm.generate(aborted, unseeded)
    for name in ("generated_tokens", "generated_text", "prompt_tokens", "prompt", "seed"):
        assert getattr(resumed, name) == getattr(whole, name), name
    for name in ("generated_log_probs", "prompt_log_probs", "generated_top_n_logprobs"):
        assert getattr(resumed, name) == getattr(whole, name), name
    assert resumed.status is Status.COMPLETED
    with pytest.raises(InvalidRequest, match="a completed result is no prompt"):
        llm.generate(resumed)


LIFECYCLE: dict[str, Callable[[LLM], Any]] = {
    "pause": lambda llm: llm.pause(),
    "unpause": lambda llm: llm.unpause(),
    "suspend": lambda llm: llm.suspend(),
    "resume": lambda llm: llm.resume(),
    "reset": lambda llm: llm.reset(),
    "set_generation_epoch": lambda llm: llm.set_generation_epoch(1),
    "update_weights": lambda llm: llm.update_weights("somewhere"),
    "serve": lambda llm: llm.serve(ServeConfig(port=0)),
    "wait_for_shutdown": lambda llm: llm.wait_for_shutdown(),
}


@pytest.mark.parametrize("name", LIFECYCLE)
def test_direct_mode_has_no_lifecycle(llm: LLM, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: needs a coordinator"):
        LIFECYCLE[name](llm)


def test_modes_that_cannot_be_are_value_errors(model: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match="AsyncLLM needs use_coordinator=True"):
        AsyncLLM(model, use_coordinator=False)
    with pytest.raises(ValueError, match="data_parallel_size is 2; without use_coordinator"):
        LLM(model, data_parallel_size=2)
    with pytest.raises(ValueError, match="data_parallel_size is 0; it must be at least 1"):
        LLM(model, use_coordinator=True, data_parallel_size=0)
    with pytest.raises(ValueError, match="engine= is for direct mode"):
        LLM(engine=llm.engine, use_coordinator=True)


def test_after_shutdown_it_says_so(model: Path) -> None:
    llm = LLM(model, engine_config=SMALL)
    assert llm.is_primary_rank
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="it was shut down"):
        llm.generate("a")


def test_its_parts_can_be_looked_at(llm: LLM) -> None:
    assert llm.scheduler is llm.engine.scheduler
    assert llm.block_pool is llm.engine.block_pool
    assert llm.runner is llm.engine.runner
    with pytest.raises(AttributeError):
        llm.engine = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_built_model_gives_what_its_checkpoint_gives(llm: LLM, model: Path) -> None:
    with LLM(reference_model(model), tokenizer=tiny_tokenizer(), engine_config=SMALL) as built:
        assert built.engine.card.dtype == "float32"
        answers = built.generate(PROMPTS, greedy())
    expected = llm.generate(PROMPTS, greedy())
    assert [r.generated_text for r in answers] == [r.generated_text for r in expected]
