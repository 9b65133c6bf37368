"""Every form in which prompts may be given, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from homing import params
from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.llm import SamplingParams
from homing.llm.prompts import Prompt, check_fits, params_of_each, read_prompts
from homing.wire import ModelCard


@pytest.mark.parametrize(
    ("given", "prompts", "is_single"),
    [
        ("Hello", ["Hello"], True),
        ("", [""], True),
        ([1, 2], [[1, 2]], True),
        ((1, 2), [[1, 2]], True),
        (np.array([1, 2]), [[1, 2]], True),
        (torch.tensor([1, 2]), [[1, 2]], True),
        (["Hello"], ["Hello"], False),
        ([[1, 2]], [[1, 2]], False),
        ([[1, 2], "Hello", (3,)], [[1, 2], "Hello", [3]], False),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]], False),
        ([np.array([1]), torch.tensor([2])], [[1], [2]], False),
        ([[]], [[]], False),
        ([], [], False),
    ],
)
def test_a_prompt_or_a_list_of_them(given: Any, prompts: list[Any], is_single: bool) -> None:
    assert read_prompts(given) == (prompts, is_single)


@pytest.mark.parametrize("given", [None, 7, {"a": 1}, b"x", [1, "a"], [[1, 2.0]], [[True]], [None]])
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"which is no token id|it must be a text"):
        read_prompts(given)


def test_parameters_are_for_all_prompts_or_for_each() -> None:
    one, other = SamplingParams(), SamplingParams(seed=1)
    assert params_of_each(None, 2) == [one, one]
    assert params_of_each(other, 2) == [other, other]
    assert params_of_each([one, other], 2) == [one, other]
    with pytest.raises(ValueError, match="there are 1 sampling_params for 2 prompts"):
        params_of_each([one], 2)
    with pytest.raises(ValueError, match=r"must be homing\.llm\.SamplingParams"):
        params_of_each(params.SamplingParams(), 2)  # pyright: ignore[reportArgumentType]


CARD = ModelCard(
    name="m",
    tokenizer_dir="",
    max_context_tokens=8,
    vocab_size=100,
    eos_token_ids=(),
    block_size=16,
)


def fits(token_ids: list[int], **values: Any) -> None:
    check_fits(Prompt(None, token_ids), params.SamplingParams(**values), CARD)


def test_prompt_and_answer_must_fit_the_context() -> None:
    fits([1] * 7)
    fits([1] * 4, num_tokens_to_generate=4)
    fits([1] * 8, num_tokens_to_generate=0)
    with pytest.raises(ContextLengthExceeded, match="has 8 tokens; the model's maximum"):
        fits([1] * 8)
    with pytest.raises(ContextLengthExceeded, match="has 4 tokens and 5 to generate; the model"):
        fits([1] * 4, num_tokens_to_generate=5)


def test_token_ids_must_be_in_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="token id 100 is not in the vocabulary of 100"):
        fits([5, 100])
    with pytest.raises(InvalidRequest, match="token id -1 is not"):
        fits([-1, 5])
    with pytest.raises(InvalidRequest, match="token id 100 in stop_token_ids"):
        fits([5], stop_token_ids=(100,))
    with pytest.raises(InvalidRequest, match="the prompt has no tokens"):
        fits([])
