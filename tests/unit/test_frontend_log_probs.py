"""/v1/completions over HTTP: log-probabilities, and prompts that are echoed and scored."""

from __future__ import annotations

import pytest
from msgspec.structs import force_setattr

from homing.frontend import stream
from homing.frontend.openai.blocks import BLOCK
from homing.frontend.tokenizing import TokenizerThread
from tests.support.byte_model import byte_id, byte_ids
from tests.support.fake_fleet import LENGTH, log_prob_of, parts, says
from tests.support.http_frontend import serving

URL = "/v1/completions"


async def test_log_probs_have_one_entry_for_each_token_of_the_answer(tmp_path):
    async with serving(tmp_path, says(byte_ids("né"))) as frontend:
        body = {"prompt": "abc", "logprobs": 2}
        log_probs = (await frontend.post(URL, body))["choices"][0]["logprobs"]
    n, first, second = byte_ids("né")
    assert log_probs["tokens"] == ["n", r"bytes:\xc3", r"bytes:\xa9"]
    assert log_probs["token_logprobs"] == [log_prob_of(n), log_prob_of(first), log_prob_of(second)]
    assert log_probs["top_logprobs"][0] == {"n": log_prob_of(n), "o": log_prob_of(n) - 1}
    assert log_probs["text_offset"] == [0, 1, 1]


async def test_tokens_of_log_probs_read_as_text(tmp_path):
    async with serving(tmp_path, lambda p, s: parts(p, s, p)) as frontend:
        body = {"prompt": "hell w", "logprobs": 0}
        log_probs = (await frontend.post(URL, body))["choices"][0]["logprobs"]
    assert log_probs["tokens"] == ["hell", " w"]
    assert [list(top) for top in log_probs["top_logprobs"]] == [["hell"], [" w"]]


async def test_the_chosen_token_is_among_the_alternatives_though_it_is_not_probable(tmp_path):
    def surprising(prompt, params):
        [part] = parts(prompt, params, byte_ids("x"))
        force_setattr(part, "top", [[(byte_id(97), -0.1), (byte_id(98), -0.2)]])
        return [part]

    async with serving(tmp_path, surprising) as frontend:
        body = {"prompt": "abc", "logprobs": 2}
        log_probs = (await frontend.post(URL, body))["choices"][0]["logprobs"]
    assert log_probs["top_logprobs"] == [
        {"a": -0.1, "b": -0.2, "x": log_probs["token_logprobs"][0]}
    ]


@pytest.mark.parametrize("extra", [{}, {"top_k": 1}])
async def test_echo_with_log_probs_scores_the_prompt_as_evaluations_expect(tmp_path, extra):
    prompt = byte_ids("né")
    body = {
        "prompt": [prompt],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "seed": 1234,
        **extra,
    }
    async with serving(tmp_path, says(byte_ids("!"))) as frontend:
        choice = (await frontend.post(URL, body))["choices"][0]
    log_probs = choice["logprobs"]
    assert choice["text"] == "né!"
    assert {name: len(values) for name, values in log_probs.items()} == dict.fromkeys(log_probs, 4)
    assert log_probs["token_logprobs"][0] is None
    assert log_probs["top_logprobs"][0] is None
    assert log_probs["token_logprobs"][1:] == list(map(log_prob_of, [*prompt[1:], byte_id(33)]))
    assert log_probs["text_offset"] == [0, 1, 1, 2]


async def test_no_tokens_with_echo_scores_the_prompt_alone(tmp_path):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    async with serving(tmp_path, says([], finish=LENGTH)) as frontend:
        whole = await frontend.post(URL, body)
        events = await frontend.stream(URL, body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert whole["usage"]["completion_tokens"] == 0
    assert events[0]["choices"] == [choice]


async def test_a_prompt_of_ids_may_break_off_inside_a_character(tmp_path):
    first, second = byte_ids("é")
    async with serving(tmp_path, says([second])) as frontend:
        body = {"prompt": [byte_id(97), first]}
        assert (await frontend.post(URL, body))["choices"][0]["text"] == "é"
        assert (await frontend.post(URL, {**body, "echo": True}))["choices"][0]["text"] == "aé"


async def test_a_log_prob_of_minus_infinity_is_a_finite_floor(tmp_path):
    def barred(prompt, params):
        [part] = parts(prompt, params, byte_ids("x"))
        force_setattr(part, "top", [[(byte_id(120), 0.0), (byte_id(98), float("-inf"))]])
        force_setattr(part, "log_probs", [float("-inf")])
        return [part]

    async with serving(tmp_path, barred) as frontend:
        body = {"prompt": "x", "logprobs": 2}
        log_probs = (await frontend.post(URL, body))["choices"][0]["logprobs"]
    assert log_probs["token_logprobs"] == [-9999.0]
    assert log_probs["top_logprobs"] == [{"x": 0.0, "b": -9999.0}]


async def test_prompt_log_probs_have_the_shape_of_vllm(tmp_path):
    b = byte_id(ord("b"))
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        body = {"prompt": "ab", "prompt_logprobs": 1}
        choice = (await frontend.post(URL, body))["choices"][0]
    entry = {"logprob": log_prob_of(b), "rank": 1, "decoded_token": "b"}
    assert choice["prompt_logprobs"] == [None, {str(b): entry}]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("change", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_scores_of_a_long_prompt_are_told_by_the_thread(tmp_path, monkeypatch, change):
    """In the very words in which they are told of a short one."""
    ran, run = [], TokenizerThread.run

    async def noting_run(thread, job):
        ran.append(job)
        return await run(thread, job)

    monkeypatch.setattr(TokenizerThread, "run", noting_run)
    async with serving(tmp_path, says(byte_ids("xy"))) as frontend:
        body = {"prompt": "abc", **change}
        short = [await frontend.post(URL, body), *await frontend.stream(URL, body)]
        assert not ran
        monkeypatch.setattr(stream, "SHORT_SCORES", 1)
        long = [await frontend.post(URL, body), *await frontend.stream(URL, body)]
    assert len(ran) == 2  # the whole answer, and the first event of the stream
    assert [answer["choices"] for answer in long] == [answer["choices"] for answer in short]


async def test_scores_of_many_short_prompts_are_told_by_the_thread(tmp_path, monkeypatch):
    ran, run = [], TokenizerThread.run

    async def noting_run(thread, job):
        ran.append(job)
        return await run(thread, job)

    monkeypatch.setattr(TokenizerThread, "run", noting_run)
    monkeypatch.setattr(stream, "SHORT_SCORES", 5)
    async with serving(tmp_path, says(byte_ids("xy"))) as frontend:
        await frontend.post(URL, {"prompt": ["ab", "ab"], "prompt_logprobs": 1})
        assert not ran
        await frontend.post(URL, {"prompt": ["ab", "ab", "ab"], "prompt_logprobs": 1})
    assert len(ran) == 1


@pytest.mark.parametrize("num_tokens", [2, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
async def test_scores_are_the_same_however_many_blocks_they_take(tmp_path, num_tokens):
    a, b = byte_ids("ab")
    prompt = [a, b] * (num_tokens // 2) + [a] * (num_tokens % 2)
    scores = [None, *map(log_prob_of, prompt[1:])]
    texts = ["ab"[index % 2] for index in range(num_tokens)]
    async with serving(tmp_path, says([b]), max_context_tokens=2**20) as frontend:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        choice = (await frontend.post(URL, body))["choices"][0]
        sglang = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 1}
        native = (await frontend.post("/generate", sglang))["meta_info"]
    told = choice["logprobs"]
    assert told["tokens"] == [*texts, "b"]
    assert told["token_logprobs"] == [*scores, log_prob_of(b)]
    assert told["text_offset"] == list(range(num_tokens + 1))
    tops = [{text: score} for text, score in zip(texts, scores, strict=True)]
    assert told["top_logprobs"] == [None, *tops[1:], {"b": log_prob_of(b)}]
    entries = [
        {str(token): {"logprob": score, "rank": 1, "decoded_token": text}}
        for token, score, text in zip(prompt, scores, texts, strict=True)
    ]
    assert choice["prompt_logprobs"] == [None, *entries[1:]]
    pairs = zip(scores[1:], prompt[1:], strict=True)
    assert native["input_token_logprobs"] == [[score, token, None] for score, token in pairs]
