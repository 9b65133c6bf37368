"""Sampling where the logits are, with a stand-in for FlashInfer."""

from __future__ import annotations

import importlib

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from homing.engine.sampling import Sampler
from homing.engine.sampling.on_device import FlashInferSampler, invert
from homing.engine.sampling.scoring import score, score_on_device
from homing.params import SamplingParams
from tests.support import fake_flashinfer
from tests.support.sampling import (
    DISTRIBUTIONS,
    chi_square,
    draws,
    random_logits,
    request,
    truncated,
)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FlashInferSampler:
    fake_flashinfer.install(monkeypatch)
    return FlashInferSampler()


@pytest.mark.parametrize(
    "params", DISTRIBUTIONS, ids=lambda params: msgspec.json.encode(params).decode()
)
def test_tokens_are_drawn_from_the_distribution_that_was_asked_for(
    sampler: FlashInferSampler, params: SamplingParams
) -> None:
    logits = random_logits(1)
    expected = truncated(torch.softmax(logits[0] / params.temperature, -1).numpy(), params)
    counts = draws(logits, params, sampler=sampler)
    assert not counts[expected == 0].any()
    assert abs(chi_square(counts, expected)) < 4


def test_greedy_and_untruncated_tokens_are_those_of_the_other_backend(
    sampler: FlashInferSampler,
) -> None:
    logits = random_logits(300)
    params = [SamplingParams(temperature=t) for t in (0.0, 0.7, 1.0)]
    requests = [request(params[row % 3], seed=row) for row in range(300)]
    tokens = sampler.sample(logits, requests).token_ids
    assert tokens == Sampler().sample(logits, requests).token_ids


def test_a_token_follows_from_its_seed_and_position_wherever_it_is_in_a_batch(
    sampler: FlashInferSampler,
) -> None:
    logits = random_logits(len(DISTRIBUTIONS))
    requests = [request(params, seed=row) for row, params in enumerate(DISTRIBUTIONS)]
    tokens = sampler.sample(logits, requests).token_ids
    for row, expected in enumerate(tokens):
        assert sampler.sample(logits[[row]], [requests[row]]).token_ids == [expected]
    backwards = list(range(len(requests)))[::-1]
    moved = sampler.sample(logits[backwards], [requests[row] for row in backwards])
    assert moved.token_ids == tokens[::-1]


def test_what_a_request_does_to_its_logits_leaves_the_others_and_the_log_probs(
    sampler: FlashInferSampler,
) -> None:
    logits = random_logits(4)
    kept = logits.clone()
    asked = [
        SamplingParams(temperature=0.0, logit_bias={7: 100.0}, return_log_probs=True),
        SamplingParams(temperature=0.0),
        SamplingParams(allowed_token_ids=(5, 6)),
        SamplingParams(top_k=1000, top_p=1.0, return_log_probs=True, top_n_logprobs=3),
    ]
    requests = [request(params, seed=3) for params in asked]
    sampled = sampler.sample(logits, requests)
    assert sampled.token_ids[0] == 7
    assert sampled.token_ids[1] == int(kept[1].argmax())
    assert sampled.token_ids[2] in (5, 6)
    assert torch.equal(logits, kept)
    expected = score(kept, np.array(sampled.token_ids), 3)
    assert [scores is None for scores in sampled.log_probs] == [False, True, True, False]
    for row, num_top in ((0, 0), (3, 3)):
        scores = sampled.log_probs[row]
        assert scores is not None
        assert scores.chosen == expected.chosen[row]
        assert scores.top_ids.tolist() == [expected.top_ids[row, :num_top].tolist()]


def test_a_library_that_is_never_deterministic_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    library = importlib.import_module("flashinfer.sampling")
    newer = library.top_k_renorm_probs

    def older(probs: Tensor, top_k: Tensor | int) -> Tensor:
        return newer(probs, top_k, is_deterministic=True)

    monkeypatch.setattr(library, "top_k_renorm_probs", older)
    requests = [request(SamplingParams(top_k=2), seed=seed) for seed in range(20)]
    tokens = FlashInferSampler().sample(random_logits(1).expand(20, -1), requests).token_ids
    assert set(tokens) == set(random_logits(1)[0].topk(2).indices.tolist())


def test_the_ends_of_a_distribution_are_drawn_only_where_there_is_probability() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    assert invert(probs, np.array([0.0, 0.5, 1.0 - 2.0**-53])).tolist() == [1, 3, 3]


@pytest.mark.parametrize("num_top", [0, 4])
def test_scores_on_the_device_are_those_on_the_cpu(num_top: int) -> None:
    logits = random_logits(20)
    chosen = np.arange(20, dtype=np.int32) * 31
    ours, theirs = (f(logits, chosen, num_top) for f in (score_on_device, score))
    np.testing.assert_array_equal(ours.chosen, theirs.chosen)
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_array_equal(ours.top, theirs.top)
    assert ours.top_ids.dtype == theirs.top_ids.dtype
