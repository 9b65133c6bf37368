"""The Python API over real processes: every mode gives the same, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from homing.errors import ConfigError, ContextLengthExceeded, InvalidRequest, NotAllowed
from homing.llm import LLM, AsyncLLM, Result, SamplingParams, ServeConfig, Status
from homing.params import Regex
from tests.support.reference import reference_model
from tests.support.tiny_llm import PROMPTS, SMALL, children, greedy, wait_until_none
from tests.support.tiny_models import make_tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def direct(model: Path) -> Iterator[LLM]:
    with LLM(model, engine_config=SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[LLM]:
    with LLM(model, engine_config=SMALL, use_coordinator=True, data_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_fleet(model: Path) -> Iterator[AsyncLLM]:
    """Made outside of any event loop, and used on those of several tests."""
    llm = AsyncLLM(model, engine_config=SMALL)
    yield llm
    asyncio.run(llm.shutdown())


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.generated_tokens for result in results]


# All modes give the same


async def test_all_modes_give_identical_greedy_text(
    direct: LLM, fleet: LLM, async_fleet: AsyncLLM
) -> None:
    expected = [result.generated_text for result in direct.generate(PROMPTS, greedy(40))]
    assert [result.generated_text for result in fleet.generate(PROMPTS, greedy(40))] == expected
    results = await async_fleet.generate(PROMPTS, greedy(40))
    assert [result.generated_text for result in results] == expected


async def test_all_modes_stream_what_they_generate(
    direct: LLM, fleet: LLM, async_fleet: AsyncLLM
) -> None:
    expected = [result.generated_text for result in direct.generate(PROMPTS, greedy(40))]
    texts = {"sync": [""] * len(PROMPTS), "async": [""] * len(PROMPTS)}
    for delta in fleet.stream(PROMPTS, greedy(40)):
        texts["sync"][delta.index] += delta.text
    async for delta in async_fleet.stream(PROMPTS, greedy(40)):
        texts["async"][delta.index] += delta.text
    assert texts == {"sync": expected, "async": expected}


def test_all_fields_of_a_result_are_the_same_in_all_modes(direct: LLM, fleet: LLM) -> None:
    asked = greedy(
        6,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        top_n_logprobs=2,
        return_prompt_tokens=True,
        seed=1,
    )
    [here], [there] = direct.generate(PROMPTS[0], asked), fleet.generate(PROMPTS[0], asked)
    timed = {"request_id", "ttft", "latency"}
    for name in Result.__slots__:
        if name not in timed:
            assert getattr(here, name) == getattr(there, name), name
    assert there.ttft is not None
    assert 0 < there.ttft <= there.latency


async def test_one_prompt_gives_one_result_to_async_callers_and_a_list_to_others(
    fleet: LLM, async_fleet: AsyncLLM
) -> None:
    [expected] = fleet.generate(PROMPTS[0], greedy())
    one = await async_fleet.generate("The capital of France is", greedy())
    assert one.generated_text == expected.generated_text
    [same] = await async_fleet.generate(["The capital of France is"], greedy())
    assert same.generated_text == expected.generated_text
    of_tokens = await async_fleet.generate([5, 6, 7], greedy())
    assert [of_tokens.generated_tokens] == tokens(fleet.generate([5, 6, 7], greedy()))
    assert fleet.generate([]) == await async_fleet.generate([]) == []


def test_seeds_give_the_same_on_any_engine(direct: LLM, fleet: LLM) -> None:
    seeded = [SamplingParams(num_tokens_to_generate=24, seed=seed) for seed in range(8)]
    assert tokens(fleet.generate(["Once"] * 8, seeded)) == tokens(
        direct.generate(["Once"] * 8, seeded)
    )


def test_more_requests_than_a_fleet_is_given_at_a_time_all_end(model: Path, fleet: LLM) -> None:
    prompts = [[5 + n % 300, 6] for n in range(2500)]
    results = fleet.generate(prompts, greedy(1, return_prompt_tokens=True))
    assert [result.prompt_tokens for result in results] == prompts


async def test_it_may_be_used_on_several_loops(fleet: LLM, async_fleet: AsyncLLM) -> None:
    def elsewhere() -> Result:
        return asyncio.run(async_fleet.generate([5, 6, 7], greedy()))

    here = await async_fleet.generate([5, 6, 7], greedy())
    there = await asyncio.to_thread(elsewhere)
    assert tokens([here, there]) == tokens(fleet.generate([[5, 6, 7]] * 2, greedy()))


# Errors


def test_what_cannot_be_served_is_a_value_error_before_anything_starts(fleet: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="the prompt has 600 tokens"):
        fleet.generate([[5], [5] * 600])
    with pytest.raises(InvalidRequest, match="token id 320 is not in the vocabulary of 320"):
        list(fleet.stream([320]))


async def test_an_error_that_ends_a_request_is_raised_or_returned(
    fleet: LLM, async_fleet: AsyncLLM
) -> None:
    wrong = greedy(structured_output=Regex("(?=a)b"))
    with pytest.raises(InvalidRequest, match="structured output"):
        fleet.generate(["a", "b"], [greedy(), wrong])
    with pytest.raises(InvalidRequest, match="structured output"):
        [delta async for delta in async_fleet.stream("b", wrong)]
    fine, failed = fleet.generate(["a", "b"], [greedy(), wrong], raise_errors=False)
    assert (fine.status, failed.status) == (Status.COMPLETED, Status.FAILED)


async def test_media_for_a_model_that_takes_none_is_a_value_error(
    fleet: LLM, async_fleet: AsyncLLM
) -> None:
    image: Any = {"multi_modal_data": {"image": b"pixels"}}
    message = "the model tiny-llama takes no media: multi_modal_data must be None"
    with pytest.raises(ValueError, match=message):
        fleet.generate("What is it?", **image)
    for call in (async_fleet.generate("a", **image), anext(async_fleet.stream("a", **image))):
        with pytest.raises(ValueError, match=message):
            await call


def test_engines_of_a_coordinator_cannot_be_reached_into(fleet: LLM) -> None:
    with pytest.raises(RuntimeError, match="in coordinator mode the engines are other processes"):
        _ = fleet.scheduler


def test_a_call_from_the_fleets_own_thread_is_refused_rather_than_stuck(fleet: LLM) -> None:
    async def inside() -> Any:
        return fleet.pause()

    assert fleet._runtime is not None
    with pytest.raises(RuntimeError, match="it would wait for itself"):
        fleet._runtime.thread.run(inside())


# Ending requests


async def test_what_is_cancelled_or_left_is_aborted(fleet: LLM, async_fleet: AsyncLLM) -> None:
    running = asyncio.create_task(async_fleet.generate([5, 6, 7], greedy(500)))
    stream = async_fleet.stream([5, 6, 7], greedy(500))
    await anext(stream)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    of_sync = fleet.stream([5, 6, 7], greedy(500))
    next(of_sync)
    of_sync.close()  # pyright: ignore[reportAttributeAccessIssue]
    for llm in (fleet, async_fleet):
        deadline = time.monotonic() + 60
        while llm._runtime.fleet.requests._running:  # pyright: ignore
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


def test_paused_engines_take_requests_and_answer_them_later(fleet: LLM) -> None:
    assert set(fleet.pause()) == {0, 1}
    fleet.pause()
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.extend(fleet.generate(PROMPTS, greedy())))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    fleet.unpause()
    thread.join(60)
    assert [len(result.generated_tokens) for result in results] == [12] * len(PROMPTS)


def test_aborted_requests_keep_what_was_generated(fleet: LLM) -> None:
    stream = fleet.stream(PROMPTS[0], greedy(400))
    first = next(stream)
    fleet.abort([first.request_id])
    *_, last = stream
    assert last.result is not None
    assert last.result.status is Status.ABORTED
    assert last.result.generated_tokens[:1] == first.tokens


def test_partial_rollouts_are_taken_out_and_put_back_in(direct: LLM, fleet: LLM) -> None:
    asked = greedy(300, return_prompt_tokens=True, return_log_probs=True)
    expected = direct.generate(PROMPTS, asked)
    stream = fleet.stream(PROMPTS, asked)
    seen: set[int] = set()
    results: dict[int, Result] = {}
    for delta in stream:
        if delta.result is not None:
            results[delta.index] = delta.result
        if delta.index not in seen:
            seen.add(delta.index)
            if len(seen) == len(PROMPTS):
                fleet.pause("abort")
    fleet.unpause()
    partial = [index for index, result in results.items() if result.status is Status.ABORTED]
    rest = fleet.generate([results[index] for index in partial], asked)
    results |= dict(zip(partial, rest, strict=True))
    whole = [results[index] for index in range(len(PROMPTS))]
    assert tokens(whole) == tokens(expected)
    assert [r.generated_log_probs for r in whole] == [r.generated_log_probs for r in expected]
    assert [r.generated_text for r in whole] == [r.generated_text for r in expected]


# Lifecycle

REFUSED = {("running", "suspend"), ("running", "resume"), ("suspended", "unpause")}
MOVES = {
    ("running", "pause"): "paused",
    ("paused", "unpause"): "running",
    ("paused", "suspend"): "suspended",
    ("suspended", "resume"): "paused",
}


def test_lifecycle_calls_may_come_in_any_order(model: Path, direct: LLM, fleet: LLM) -> None:
    """Each after each of the others, while requests come in. Both ranks answer, or it is an error;
    nothing hangs, no request is lost, and as the weights stay the same, no token changes."""
    tensors, epochs = reference_model(model).state_dict(), count(1000, 1000)
    commands: list[tuple[str, Callable[[], Any]]] = [
        ("pause", fleet.pause),
        ("pause", lambda: fleet.pause("abort")),
        ("pause", lambda: fleet.pause("wait")),
        ("unpause", fleet.unpause),
        ("suspend", lambda: fleet.suspend("discard", "offload")),
        ("suspend", lambda: fleet.suspend("offload")),
        ("resume", fleet.resume),
        ("reset", fleet.reset),
        ("set_epoch", lambda: fleet.set_generation_epoch(next(epochs))),
        ("update", lambda: fleet.update_weights(model)),
        ("update", lambda: fleet.update_weights(tensors)),
    ]
    prompts = [[5 + n, 6, 7] for n in range(120)]
    asked = greedy(20, ignore_eos=True)
    state, seen = "running", set[tuple[str, str]]()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(fleet.generate, prompt, asked) for prompt in prompts]
        for name, call in (command for pair in product(commands, commands) for command in pair):
            seen.add((state, name))
            if (state, name) in REFUSED:
                with pytest.raises(NotAllowed):
                    call()
            else:
                assert set(call()) == {0, 1}, (state, name)
                state = MOVES.get((state, name), state)
        assert seen == set(product(("running", "paused", "suspended"), dict(commands)))
        if state == "suspended":
            fleet.resume()
        fleet.unpause()
        results = [result for future in running for result in future.result(60)]
    for result, whole in zip(results, tokens(direct.generate(prompts, asked)), strict=True):
        assert result.generated_tokens == whole[: len(result.generated_tokens)]
        assert result.status is Status.ABORTED or result.generated_tokens == whole
        assert result.token_epochs == sorted(result.token_epochs)


# Engines


def test_text_is_the_same_when_an_engine_is_killed(direct: LLM, fleet: LLM) -> None:
    expected = tokens(direct.generate(PROMPTS * 4, greedy(300)))
    results: list[Result] = []
    stream = fleet.stream([5, 6, 7], greedy(300))
    next(stream)
    thread = threading.Thread(
        target=lambda: results.extend(fleet.generate(PROMPTS * 4, greedy(300)))
    )
    thread.start()
    next(stream)
    victim = children("engine")[0]
    victim.kill()
    thread.join(60)
    assert tokens(results) == expected
    list(stream)
    deadline = time.monotonic() + 60
    while len(children("engine")) < 2 or victim in children("engine"):
        assert time.monotonic() < deadline, "it was not started again"
        time.sleep(0.1)


def test_new_weights_reach_every_engine(model: Path, direct: LLM, tmp_path: Path) -> None:
    """With settings that are not the defaults, which reach the engine processes, too."""
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    with LLM(other, engine_config=SMALL) as llm:
        expected = tokens(llm.generate(PROMPTS, greedy()))
    config = replace(
        SMALL,
        kv_cache_management_mode="discard",
        enable_prefix_caching=False,
        batch_invariant=True,
    )
    long = list(range(20, 80))
    assert [direct.generate(long, greedy(1))[0].num_cached_tokens for _ in range(2)] == [0, 48]
    with LLM(model, engine_config=config, use_coordinator=True, data_parallel_size=2) as llm:
        before = tokens(llm.generate(PROMPTS, greedy()))
        assert before == tokens(direct.generate(PROMPTS, greedy())) != expected
        for _ in range(3):  # by two engines
            assert llm.generate(long, greedy(1))[0].num_cached_tokens == 0
        llm.pause()
        assert all(result["kv_bytes"] > 0 for result in llm.suspend().values())
        assert set(llm.update_weights(reference_model(other).state_dict())) == {0, 1}
        llm.resume()
        llm.unpause()
        results = llm.generate(PROMPTS, greedy())
        assert tokens(results) == expected
        assert {epoch for result in results for epoch in result.token_epochs} == {1}
        llm.update_weights()
        assert tokens(llm.generate(PROMPTS, greedy())) == before
        llm.set_generation_epoch(7)
        llm.reset()
        [result] = llm.generate([5, 6], greedy(1))
        assert result.token_epochs == [7]


async def test_a_built_model_is_served_by_processes_too(direct: LLM, model: Path) -> None:
    async with AsyncLLM(
        reference_model(model), tokenizer=tiny_tokenizer(), engine_config=SMALL
    ) as llm:
        results = await llm.generate(PROMPTS, greedy())
    assert tokens(results) == tokens(direct.generate(PROMPTS, greedy()))


# HTTP


async def test_the_same_engines_serve_http(fleet: LLM) -> None:
    url = fleet.serve(ServeConfig(port=0, frontend_replicas=1), blocking=False)
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{url}/v1/completions", json=body)
    [result] = fleet.generate("Once upon a time", greedy())
    assert reply.json()["choices"][0]["text"] == result.generated_text
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        fleet.serve(ServeConfig(port=port), blocking=False)
    assert fleet.generate("Once upon a time", greedy())


async def test_serving_and_waiting_end_with_shutdown(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "own")
    llm = AsyncLLM(model, engine_config=SMALL)
    url = await llm.serve(ServeConfig(port=0, frontend_replicas=1), blocking=False)
    blocked = asyncio.create_task(llm.serve(ServeConfig(port=0, frontend_replicas=1)))
    waiting = asyncio.create_task(llm.wait_for_shutdown())
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"{url}/health")).status_code == 200
    assert not waiting.done()
    await llm.shutdown()
    await llm.shutdown()
    await waiting
    # It had answered, or was about to.
    [ended] = await asyncio.gather(blocked, return_exceptions=True)
    assert str(ended).startswith("http://") or str(ended) == "it was shut down"
    wait_until_none(model)
    with pytest.raises(RuntimeError, match="generate: it was shut down"):
        await llm.generate("a")
