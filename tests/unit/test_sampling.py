"""Sampling: right distributions, and the same bits for a row whatever accompanies it."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import pytest
import torch

from homing.engine.bad_words import BadWords
from homing.engine.log_probs import LogProbs
from homing.engine.request import Request
from homing.engine.sampling import Sampler, score
from homing.engine.sampling.ranking import block_maxima, largest
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from tests.support.sampling import (
    DISTRIBUTIONS,
    VOCAB,
    chi_square,
    draws,
    random_logits,
    request,
    truncated,
)

sample = Sampler().sample


@pytest.mark.parametrize(
    "params",
    DISTRIBUTIONS,
    ids=lambda params: msgspec.json.encode(params).decode(),
)
def test_tokens_are_drawn_from_the_distribution_that_was_asked_for(params: SamplingParams):
    logits = random_logits(1)
    probs = torch.softmax(logits[0] / params.temperature, -1).numpy()
    expected = truncated(probs, params)
    counts = draws(logits, params)
    assert not counts[expected == 0].any()
    assert abs(chi_square(counts, expected)) < 4


@pytest.mark.parametrize("vocab", [3, 255, 256, 257, 49152])
def test_any_vocabulary_size_is_drawn_from_evenly(vocab: int):
    counts = draws(torch.zeros(1, vocab), SamplingParams(), count=2000)
    groups = counts[: vocab - vocab % 3].reshape(3, -1).sum(-1)
    assert abs(chi_square(groups, np.full(3, 1 / 3))) < 4


def test_positions_draw_independently_under_one_seed():
    logits = torch.zeros(1, 16)
    rows = [request(SamplingParams(), seed=5, generated=[0] * n) for n in range(2000)]
    tokens = np.array(sample(logits.expand(2000, -1).contiguous(), rows).token_ids)
    counts = np.bincount(tokens, minlength=16)
    pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
    assert abs(chi_square(counts, np.full(16, 1 / 16))) < 4
    assert abs(chi_square(pairs, np.full(256, 1 / 256))) < 4


# What a request may do to its logits


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals():
    logits = random_logits(3)
    logits[1, [17, 900, 400]] = 50.0
    requests = [request(SamplingParams(temperature=0.0))] * 3
    tokens = sample(logits, requests).token_ids
    assert tokens == [int(logits[0].argmax()), 17, int(logits[2].argmax())]


def test_top_k_of_one_and_a_tiny_temperature_are_greedy():
    logits = random_logits(2)
    requests = [request(SamplingParams(top_k=1)), request(SamplingParams(temperature=1e-30))]
    assert sample(logits, requests).token_ids == logits.argmax(-1).tolist()


def test_top_k_with_ties_at_its_edge_keeps_the_lowest_ids():
    logits = torch.zeros(1, VOCAB)
    logits[0, [900, 5, 300]] = 4.0
    counts = draws(logits, SamplingParams(top_k=5), count=2000)
    assert set(np.flatnonzero(counts)) == {0, 1, 5, 300, 900}


def test_repetition_penalty_reads_prompt_and_answer():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 2.0, 1.9, 1.8
    logits[0, 11] = -1.0
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    asked = request(params, prompt=[7, 11], generated=[8])
    assert sample(logits, [asked]).token_ids == [9]


def test_presence_and_frequency_penalties_read_the_answer_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.5, 2.0
    params = SamplingParams(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.35)
    once = request(params, prompt=[7, 7, 7], generated=[8])
    twice = request(params, prompt=[9], generated=[7, 7])
    thrice = request(params, prompt=[9], generated=[7, 8, 7])
    assert sample(logits.repeat(3, 1), [once, twice, thrice]).token_ids == [7, 8, 9]


def test_logit_bias_moves_and_bars_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 500.0, 3.0
    params = SamplingParams(temperature=0.0, logit_bias={7: -100.0, 9: 3.5})
    assert sample(logits, [request(params)]).token_ids == [9]


def test_only_allowed_tokens_are_drawn_and_as_often_as_they_should():
    logits = random_logits(1)
    allowed = (3, 500, 501, 998)
    counts = draws(logits, SamplingParams(allowed_token_ids=allowed))
    expected = np.zeros(VOCAB)
    expected[list(allowed)] = torch.softmax(logits[0, list(allowed)], -1).numpy()
    assert set(np.flatnonzero(counts)) <= set(allowed)
    assert abs(chi_square(counts, expected)) < 4


def test_what_bars_all_allowed_tokens_gives_way():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=(8, 9), logit_bias={8: -100.0}, min_tokens=5
    )
    assert sample(logits, [request(params)]).token_ids == [9]
    assert sample(logits, [request(params, stop_token_ids=frozenset({9}))]).token_ids == [8]


class Letters:
    """A tokenizer of one token a letter; a space is 1, a is 11."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [1 if letter == " " else ord(letter) - ord("a") + 11 for letter in text]


def test_the_last_token_of_a_bad_word_is_barred_behind_the_others_of_the_answer():
    logits = torch.zeros(1, VOCAB)
    logits[0, 12], logits[0, 13] = 9.0, 8.0  # b, c
    params = SamplingParams(temperature=0.0, bad_words=("ab",))

    def asked(prompt: list[int], generated: list[int]) -> Request:
        made = request(params, prompt=prompt, generated=generated)
        made.bad_words = BadWords(cast(Tokenizer, Letters()), params.bad_words)
        return made

    behind_a, behind_b, in_prompt = asked([5], [11]), asked([5], [11, 12]), asked([11], [])
    tokens = sample(logits.repeat(3, 1), [behind_a, behind_b, in_prompt]).token_ids
    assert tokens == [13, 12, 12]


def test_a_bad_word_of_one_token_is_barred_always_with_and_without_a_space():
    words = BadWords(cast(Tokenizer, Letters()), ["b", " cd"])
    assert words.barred([]) == [12]
    assert words.barred([1]) == [12]
    assert words.barred([13]) == [12]
    assert words.barred([1, 13]) == [12, 14]


def test_stop_ids_are_barred_until_min_tokens_are_generated():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3] = 9.0, 8.0
    params = SamplingParams(temperature=0.0, min_tokens=2)
    stops = frozenset({2})
    asked = [request(params, generated=[5] * n, stop_token_ids=stops) for n in range(3)]
    assert sample(logits.repeat(3, 1), asked).token_ids == [3, 3, 2]


def test_sampling_leaves_the_logits_as_they_are():
    logits = random_logits(2)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, logit_bias={3: -100.0}, temperature=0.5)
    sample(logits, [request(params), request(SamplingParams())])
    assert torch.equal(logits, before)


# Log-probabilities


def test_log_probs_are_those_of_the_raw_logits():
    logits = random_logits(1)
    params = SamplingParams(
        temperature=0.3, top_k=3, logit_bias={5: 9.0}, return_log_probs=True, top_n_logprobs=4
    )
    sampled = sample(logits, [request(params)])
    [scores] = sampled.log_probs
    assert scores is not None
    raw = torch.log_softmax(logits[0], -1)
    values, ids = raw.topk(4)
    assert scores.chosen.tolist() == [raw[sampled.token_ids[0]].item()]
    assert scores.top_ids.tolist() == [ids.tolist()]
    assert scores.top.tolist() == [values.tolist()]


def test_top_log_probs_with_ties_name_the_lowest_ids():
    logits = torch.zeros(1, VOCAB)
    logits[0, 600] = 1.0
    scores = score(logits, np.array([0]), 4)
    assert scores.top_ids.tolist() == [[600, 0, 1, 2]]


def test_rows_that_want_no_log_probs_get_none():
    params = [SamplingParams(), SamplingParams(return_log_probs=True)]
    sampled = sample(random_logits(2), [request(p) for p in params])
    assert sampled.log_probs[0] is None
    assert isinstance(sampled.log_probs[1], LogProbs)


def test_scores_of_many_rows_equal_those_of_each_alone():
    logits = random_logits(100)
    chosen = np.arange(100)
    together = score(logits, chosen, 5)
    for row in range(100):
        alone = score(logits[row : row + 1], chosen[row : row + 1], 5)
        assert alone.chosen[0] == together.chosen[row]
        assert alone.top_ids[0].tolist() == together.top_ids[row].tolist()
        assert alone.top[0].tolist() == together.top[row].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 60, 999, 1000, 5000])
def test_largest_ranks_as_a_full_sort_does(count: int):
    values = torch.randint(0, 50, (1, VOCAB), generator=torch.Generator().manual_seed(3)).float()
    row = values[0].numpy()
    expected = np.argsort(-row, kind="stable")[:count]
    assert largest(row, block_maxima(values)[0], count).tolist() == expected.tolist()


# A row alone, and in any company

MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=20, min_p=0.05),
    SamplingParams(temperature=1.4, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={4: 5.0}),
    SamplingParams(min_p=0.02, return_log_probs=True, top_n_logprobs=3),
    SamplingParams(return_log_probs=True),
    SamplingParams(temperature=0.9, min_tokens=50, top_p=0.99),
]


@pytest.mark.parametrize("vocab", [VOCAB, 49152])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(vocab: int, num_threads: int):
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        count = 45
        logits = random_logits(count, vocab)
        requests = [
            request(MIX[i % len(MIX)], seed=i, prompt=[i + 1, 4], generated=[i, 4, 4])
            for i in range(count)
        ]
        alone = [sample(logits[i : i + 1].clone(), [requests[i]]) for i in range(count)]
        shuffle = np.random.default_rng(0)
        for size in (2, 7, count):
            rows = shuffle.permutation(count)[:size].tolist()
            together = sample(logits[rows], [requests[row] for row in rows])
            for index, row in enumerate(rows):
                assert together.token_ids[index] == alone[row].token_ids[0]
                assert_equal(together.log_probs[index], alone[row].log_probs[0])
    finally:
        torch.set_num_threads(threads_before)


def assert_equal(left: LogProbs | None, right: LogProbs | None) -> None:
    if left is None or right is None:
        assert left is right
        return
    assert left.chosen.tobytes() == right.chosen.tobytes()
    assert left.top_ids.tobytes() == right.top_ids.tobytes()
    assert left.top.tobytes() == right.top.tobytes()
