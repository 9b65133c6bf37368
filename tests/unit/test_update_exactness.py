"""After an update, an engine answers as one that was started with the new weights: prompts that
were cached before it, that were in flight, and that are new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from homing.engine.models.checkpoint import TensorFiles
from homing.llm import Delta, Engine, EngineConfig
from tests.support.tiny_llm import greedy
from tests.support.tiny_models import make_tiny_model

CONFIG = EngineConfig(buffer_size_gb=0.02, max_requests=8, max_tokens=64, num_threads=1)
PROMPTS = {name: [20 + n, *range(30, 90)] for n, name in enumerate(["before", "during", "after"])}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_tiny_model("llama", tmp_path_factory.mktemp("models") / f"tiny-{seed}", seed=seed)
        for seed in range(2)
    ]


def trainer_tensors(model: Path) -> dict[str, Tensor]:
    files = TensorFiles([model / "model.safetensors"])
    return {name: tensor.clone() for name, tensor in files.items()}


def finish(engine: Engine, request_id: int) -> tuple[list[int], int, list[int]]:
    """Tokens, cached tokens and epochs of a request."""
    deltas: list[Delta] = []
    while engine.has_unfinished_requests:
        deltas += engine.step()
    [result] = [d.result for d in deltas if d.result is not None and d.request_id == request_id]
    return result.generated_tokens, result.num_cached_tokens, result.token_epochs


def ask(engine: Engine, prompt: list[int]) -> tuple[list[int], int, list[int]]:
    return finish(engine, engine.add_request(prompt, greedy(NUM_TOKENS, ignore_eos=True)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prompts_cached_before_during_and_after_an_update_are_those_of_a_fresh_engine(
    models: list[Path], dtype: Any
) -> None:
    """The weights come from an iterator over a trainer's tensors, which it then steps in place."""
    config = replace(CONFIG, dtype=dtype)
    with Engine(models[1], config=config) as fresh:
        expected = {name: ask(fresh, prompt)[0] for name, prompt in PROMPTS.items()}
    with Engine(models[0], config=config) as engine:
        old = ask(engine, PROMPTS["before"])[0]
        assert old != expected["before"]
        assert ask(engine, PROMPTS["before"])[1] == 48
        in_flight = engine.add_request(PROMPTS["during"], greedy(NUM_TOKENS, ignore_eos=True))
        while not engine.step():
            pass

        tensors = trainer_tensors(models[1])
        engine.update_weights(iter(tensors.items()), in_flight="recompute")
        for tensor in tensors.values():
            tensor.mul_(-2.0)

        tokens, _, epochs = finish(engine, in_flight)
        num_old = epochs.count(0)
        assert 0 < num_old < NUM_TOKENS
        with Engine(models[1], config=config) as fresh:
            rest = ask(fresh, [*PROMPTS["during"], *tokens[:num_old]])[0]
        assert tokens[num_old:] == rest[: NUM_TOKENS - num_old]

        for name in ("before", "after"):
            first, again = (ask(engine, PROMPTS[name]) for _ in range(2))
            assert first[:2] == (expected[name], 0)
            assert again == (expected[name], 48, [1] * NUM_TOKENS)
        assert ask(engine, PROMPTS["during"])[0] == expected["during"]
