"""What may be asked of the Python API, and what an engine is then told."""

from __future__ import annotations

from typing import Any

import pytest
import tyro

from homing import params
from homing.engine import config as engine_config
from homing.errors import InvalidRequest
from homing.launch.config import LaunchConfig
from homing.llm import EngineConfig, SamplingParams, ServeConfig
from homing.llm.config import ENGINE_FIELDS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': Expected `float`"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0.0 to 1.0"),
        ({"top_k": 2.5}, "top_k is 2.5: Expected `int`"),
        ({"streaming_interval": 0}, "streaming_interval is 0; it must be at least 1"),
        ({"streaming_interval": True}, "streaming_interval is True: Expected `int`"),
        ({"num_tokens_total": 0}, "num_tokens_total is 0; it must be at least 1"),
        ({"termination_id": -1}, "termination_id is -1; it must be at least 0"),
        ({"stop_words": [1]}, "stop_words is "),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is "),
        ({"top_n_logprobs": 3}, "top_n_logprobs needs return_log_probs"),
        ({"num_tokens_total": 9, "num_tokens_to_generate": 3}, "exclude each other"),
    ],
)
def test_a_bad_value_names_its_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1.0)  # pyright: ignore[reportCallIssue]


def test_lists_are_taken_for_tuples_and_a_string_for_one_stop_word() -> None:
    given = SamplingParams(stop_words=["a", "b"], stop_token_ids=[3])  # pyright: ignore
    assert given == SamplingParams(stop_words=("a", "b"), stop_token_ids=(3,))
    assert SamplingParams(stop_words="END").stop_words == ("END",)  # pyright: ignore


def test_an_engine_is_told_only_what_it_honours() -> None:
    given = SamplingParams(
        temperature=0.5,
        seed=3,
        stop_token_ids=(4,),
        termination_id=9,
        num_tokens_total=12,
        add_BOS=True,
        return_prompt_tokens=True,
        streaming_interval=4,
    )
    told = given.for_engine(num_prompt_tokens=5)
    assert type(told) is params.SamplingParams
    assert told == params.SamplingParams(
        temperature=0.5,
        seed=3,
        stop_token_ids=(4, 9),
        ignore_eos=True,
        num_tokens_to_generate=7,
    )


def test_an_engine_is_told_a_seed_that_differs_from_call_to_call() -> None:
    assert SamplingParams().for_engine(1).seed != SamplingParams().for_engine(1).seed


def test_a_prompt_longer_than_the_total_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 5 tokens; num_tokens_total is 4"):
        SamplingParams(num_tokens_total=4).for_engine(num_prompt_tokens=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_requests": 0}, "max_requests is 0; it must be at least 1"),
        ({"max_tokens": 4, "max_requests": 8}, "max_tokens is 4, less than max_requests, 8"),
        ({"buffer_size_gb": 0.0}, "buffer_size_gb is 0.0; it must be above 0"),
        ({"max_sequence_length": 1}, "max_sequence_length is 1; it must be at least 2"),
        ({"dtype": "int7"}, "dtype is 'int7'; it must be one of bf16, fp16, fp32"),
        ({"quantization": "int3"}, "quantization is 'int3'; it must be one of int8, int4, fp8"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4'; it must be one of auto, bf16, int8"),
        ({"attention_backend": "xformers"}, "attention_backend is 'xformers'; it must be one"),
        ({"sampling_backend": "cpu"}, "sampling_backend is 'cpu'; it must be one"),
        ({"num_cuda_graphs": -1}, "num_cuda_graphs is -1"),
        ({"prefix_caching_eviction_policy": "fifo"}, "'fifo'; it must be one of lru, ref_zero"),
        ({"kv_cache_management_mode": "keep"}, "'keep'; it must be one of persist, offload"),
        ({"routing_policy": "luck"}, "routing_policy is 'luck'; it must be one of prefix"),
        ({"routing_alpha": float("nan")}, "routing_alpha is nan"),
        ({"num_threads": 0}, "num_threads is 0; it must be at least 1"),
    ],
)
def test_bad_settings_of_an_engine_are_value_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port is 70000; it must be from 0 to 65535"),
        ({"frontend_replicas": 0}, "frontend_replicas is 0; it must be at least 1"),
        ({"parsers": ["guess"]}, "parsers has 'guess'; there are hermes"),
        ({"parsers": "hermes"}, "it must be a list of names"),
        ({"parsers": ["hermes", "mistral"]}, "two of one kind"),
    ],
)
def test_bad_settings_of_a_server_are_value_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeConfig(**values)


def test_parsers_are_told_apart_by_their_names() -> None:
    config = ServeConfig(parsers=["qwen3", "hermes"])
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "qwen3")
    assert ServeConfig().tool_call_parser is None


def test_each_setting_of_an_engine_is_a_flag_of_the_same_name() -> None:
    settings = EngineConfig(
        max_sequence_length=700,
        buffer_size_gb=0.5,
        block_size_tokens=8,
        max_requests=4,
        max_tokens=900,
        enable_prefix_caching=False,
        prefix_caching_eviction_policy="ref_zero",
        enable_chunked_prefill=False,
        preemption="offload",
        attention_backend="torch",
        sampling_backend="torch",
        device="cpu",
        num_cuda_graphs=4,
        cuda_graph_max_requests=2,
        batch_invariant=True,
        dtype="fp32",
        quantization="int8",
        kv_cache_dtype="int8",
        num_threads=3,
    )
    words: list[str] = []
    for name in ENGINE_FIELDS:
        value = getattr(settings, name)
        assert value != getattr(EngineConfig(), name)
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    engine = tyro.cli(engine_config.EngineConfig, args=["--coordinator", "", *words])
    assert engine == settings.of_engine(None)
    launch = tyro.cli(LaunchConfig, args=words, config=(tyro.conf.FlagCreatePairsOff,))
    assert launch == settings.of_launch(None, 1)
