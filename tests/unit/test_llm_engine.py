"""The engine of direct mode by itself: what it is made from, and stepping it by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from homing.errors import ConfigError, ContextLengthExceeded
from homing.llm import Engine, EngineConfig, Status
from tests.support.reference import reference_model
from tests.support.tiny_llm import SMALL, greedy
from tests.support.tiny_models import make_tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, config=SMALL) as engine:
        yield engine


def run(engine: Engine) -> dict[int, str]:
    """Step to the end; the texts by request."""
    texts: dict[int, str] = {}
    while engine.has_unfinished_requests:
        for delta in engine.step():
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
    return texts


# What it is made from


def test_a_built_model_leaves_no_file(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Engine(reference_model(model), tiny_tokenizer(), SMALL):
        assert list(tmp_path.glob("homing-model-*/*/model.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_may_have_another_tokenizer(model: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    with Engine(model, tmp_path, SMALL) as engine:
        assert engine.card.name == "tiny-llama"
        engine.add_request("Once", greedy(2))
        assert run(engine)


@pytest.mark.parametrize(
    ("given", "tokenizer", "error", "message"),
    [
        (7, None, ValueError, "model is of type int; it must be a path or a transformers model"),
        ("nowhere", None, ConfigError, "no model at nowhere"),
        (torch.nn.Linear(1, 1), None, ValueError, "model is of type Linear"),
    ],
)
def test_what_is_no_model_is_refused(
    given: Any, tokenizer: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(given, tokenizer, SMALL)


def test_a_built_model_that_cannot_run_is_refused(model: Path, tmp_path: Path) -> None:
    unsupported = reference_model(make_tiny_model("gemma2", tmp_path))
    with pytest.raises(ConfigError, match="architecture Gemma2ForCausalLM is not supported"):
        Engine(unsupported, tiny_tokenizer(), SMALL)
    with pytest.raises(ConfigError, match="comes without a tokenizer"):
        Engine(reference_model(model), config=SMALL)
    with pytest.raises(ValueError, match="tokenizer is of type int"):
        Engine(model, 7, SMALL)


def test_settings_reach_the_engine(model: Path) -> None:
    config = EngineConfig(
        buffer_size_gb=0.01, block_size_tokens=4, max_requests=2, max_sequence_length=64
    )
    with Engine(model, config=config) as engine:
        limits = engine.core.limits
        assert (limits.block_size, limits.max_batch_requests) == (4, 2)
        assert engine.card.max_context_tokens == 64


# Stepping by hand


def test_requests_arrive_between_steps(engine: Engine) -> None:
    alone = {}
    for prompt in ("Once", "The"):
        request_id = engine.add_request(prompt, greedy())
        alone[prompt] = run(engine)[request_id]
    first = engine.add_request("Once", greedy())
    texts = {first: "".join(delta.text for _ in range(3) for delta in engine.step())}
    second = engine.add_request("The", greedy())
    for request_id, text in run(engine).items():
        texts[request_id] = texts.get(request_id, "") + text
    assert texts == {first: alone["Once"], second: alone["The"]}
    assert engine.step() == []


def test_an_aborted_request_ends_at_the_next_step(engine: Engine) -> None:
    request_id = engine.add_request("Once", greedy(100))
    engine.step()
    engine.abort(request_id)
    engine.abort(request_id)
    [delta] = engine.step()
    assert delta.result is not None
    assert delta.result.status is Status.ABORTED
    assert len(delta.result.generated_tokens) == 1
    assert not engine.has_unfinished_requests


def test_reset_ends_everything_and_forgets_every_prefix(engine: Engine) -> None:
    prompt = [9] * 64
    engine.add_request(prompt, greedy(2))
    run(engine)
    running = [engine.add_request(prompt, greedy(100)) for _ in range(2)]
    engine.step()
    ends = engine.reset()
    assert sorted(delta.request_id for delta in ends) == running
    assert {delta.result.status for delta in ends if delta.result} == {Status.ABORTED}
    assert not engine.has_unfinished_requests
    assert engine.block_pool.num_available == engine.block_pool.capacity
    engine.add_request(prompt, greedy(2))
    [result] = [delta.result for _ in range(2) for delta in engine.step() if delta.result]
    assert result.num_cached_tokens == 0


async def test_async_steps_let_the_loop_go_on(engine: Engine) -> None:
    request_id = engine.add_request("Once", greedy())
    text = ""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    while engine.has_unfinished_requests:
        text += "".join(delta.text for delta in await engine.async_step())
    counting.cancel()
    assert turns > 12
    again = engine.add_request("Once", greedy())
    assert run(engine)[again] == text
    assert again != request_id


def test_add_request_takes_one_prompt(engine: Engine) -> None:
    with pytest.raises(ValueError, match="add_request takes one prompt"):
        engine.add_request(["a", "b"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ContextLengthExceeded):
        engine.add_request([5] * 600)
    assert not engine.has_unfinished_requests


def test_new_weights_serve_from_the_next_step_on(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    with Engine(other, config=SMALL) as engine:
        request_id = engine.add_request([5, 6, 7], greedy())
        expected = run(engine)[request_id]
    with Engine(model, config=SMALL) as engine:
        engine.add_request([5, 6, 7], greedy())
        assert list(run(engine).values()) != [expected]
        assert engine.update_weights(other) == 1
        engine.add_request([5, 6, 7], greedy())
        [result] = [delta.result for _ in range(12) for delta in engine.step() if delta.result]
        assert result.generated_text == expected
        assert result.token_epochs == [1] * 12
        assert engine.update_weights(reference_model(model).state_dict(), epoch=5) == 5
        engine.add_request([5, 6, 7], greedy())
        assert list(run(engine).values()) != [expected]
