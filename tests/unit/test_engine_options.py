"""What the settings of an engine change, by way of the Python API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from homing.engine import weights
from homing.engine.kernels.decoder import CDecoder
from homing.engine.models.llama import TorchDecoder
from homing.engine.scheduler import whole_prompts
from homing.errors import ConfigError
from homing.llm import LLM, Engine, EngineConfig
from homing.native import NoCompiler
from tests.support.tiny_llm import SMALL, greedy
from tests.support.tiny_models import make_tiny_model

PROMPT = list(range(20, 120))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


def cached_tokens(model: Path, config: EngineConfig) -> tuple[list[int], list[int]]:
    """Of two requests of one prompt, one after the other, and of two of another at once."""
    with LLM(model, engine_config=config) as llm:
        after = [llm.generate(PROMPT, greedy(4))[0] for _ in range(2)]
        beside = llm.generate([[7, *PROMPT]] * 2, greedy(4))
        tokens = [result.generated_tokens for result in (*after, *beside)]
        assert tokens[0] == tokens[1]
        assert tokens[2] == tokens[3]
    return [r.num_cached_tokens for r in after], [r.num_cached_tokens for r in beside]


@pytest.mark.parametrize(
    ("settings", "after", "beside"),
    [
        ({}, [0, 96], [0, 96]),
        ({"prefix_caching_eviction_policy": "ref_zero"}, [0, 0], [0, 96]),
        ({"enable_prefix_caching": False}, [0, 0], [0, 0]),
    ],
)
def test_a_prefix_is_kept_for_as_long_as_the_settings_say(
    model: Path, settings: dict[str, Any], after: list[int], beside: list[int]
) -> None:
    assert cached_tokens(model, replace(SMALL, **settings)) == (after, beside)


def test_without_chunked_prefill_a_prompt_takes_one_step_and_answers_wait(model: Path) -> None:
    long = list(range(20, 270)) + list(range(20, 270))
    config = replace(SMALL, max_tokens=512)
    whole = replace(config, enable_chunked_prefill=False)
    tokens: list[list[int]] = []
    for settings, num_steps, answers_wait in ((config, 2, False), (whole, 1, True)):
        with Engine(model, config=settings) as engine:
            answering = [engine.add_request([5, n], greedy(200)) for n in range(7)]
            engine.step()
            reading = engine.add_request([9] * 6 + long, greedy(3))
            deltas = [engine.step() for _ in range(4)]
            answered = [{delta.request_id for delta in step} for step in deltas]
            assert (answered[0] == {reading}) == answers_wait
            assert [reading in ids for ids in answered].index(True) + 1 == num_steps
            assert set(answering) <= answered[1]
            tokens.append(
                [t for s in deltas for d in s if d.request_id == reading for t in d.tokens]
            )
    assert tokens[0][:2] == tokens[1][:2]


def test_without_chunked_prefill_a_step_must_have_room_for_a_prompt(model: Path) -> None:
    config = replace(SMALL, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="--max-step-tokens is 64, a request may have 512 tokens"):
        Engine(model, config=config)
    with Engine(model, config=replace(config, max_sequence_length=64)):
        pass


def test_whole_prompts_are_passed_by_those_that_fit() -> None:
    assert whole_prompts([5, 9, 3], 10) == [5, 0, 3]
    assert whole_prompts([11], 10) == [0]


def test_what_computes_can_be_chosen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(model, config=replace(SMALL, attention_backend="torch")) as engine:
        assert isinstance(engine.runner.model, TorchDecoder)

    def no_compiler(cache_dir: Path) -> None:
        raise NoCompiler("there is no C compiler")

    monkeypatch.setattr(weights, "load_library", no_compiler)
    with Engine(model, config=SMALL) as engine:
        assert isinstance(engine.runner.model, TorchDecoder)
    with pytest.raises(ConfigError, match="--attention-backend cpu: there is no C compiler"):
        Engine(model, config=replace(SMALL, attention_backend="cpu"))


@pytest.mark.parametrize("backend", [CDecoder, TorchDecoder])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_failed_self_check_is_fatal_where_invariance_is_asked_for(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: type[CDecoder] | type[TorchDecoder],
    dtype: Any,
) -> None:
    name = "cpu" if backend is CDecoder else "torch"
    config = replace(SMALL, dtype=dtype, attention_backend=name)
    with Engine(model, config=replace(config, batch_invariant=True)):
        pass
    forward = backend.forward

    def depends_on_the_batch(self: Any, batch: Any, cache: Any) -> Tensor:
        logits = forward(self, batch, cache)
        logits[:, 5] += 1e-3 * len(batch.token_ids)
        return logits

    monkeypatch.setattr(backend, "forward", depends_on_the_batch)
    with pytest.raises(ConfigError, match="--batch-invariant: the self-check failed: a request"):
        Engine(model, config=replace(config, batch_invariant=True))
    with Engine(model, config=config):
        pass
