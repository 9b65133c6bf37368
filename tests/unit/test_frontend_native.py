"""/generate as SGLang has it and /inference/v1/generate as vLLM has it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from homing.client import Part
from homing.wire import Finish, FinishReason
from tests.support.byte_model import EOS, byte_id, byte_ids
from tests.support.fake_fleet import log_prob_of, parts, says
from tests.support.http_frontend import serving, until

GENERATE = "/generate"
TOKENS = "/inference/v1/generate"
PROMPT = byte_ids("hi")


def stops_at_eos(prompt, params):
    """Says "yo" and ends by the model's own id."""
    return parts(prompt, params, [*byte_ids("yo"), EOS], finish=Finish(FinishReason.STOP, stop=EOS))


async def test_tokens_in_tokens_out(tmp_path):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
    async with serving(tmp_path, stops_at_eos) as frontend:
        reply = await frontend.post(GENERATE, body | {"rid": "r1"})
        generation = frontend.fleet.submitted[-1]
    assert generation.prompt == PROMPT
    assert generation.params.num_tokens_to_generate == 9
    assert generation.params.greedy
    assert generation.external_id == "r1"
    assert reply["text"] == "yo"
    assert reply["output_ids"] == [*byte_ids("yo"), EOS]
    info = reply["meta_info"]
    assert info.pop("e2e_latency") >= 0
    assert info == {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "0",
    }


async def test_a_text_is_a_prompt_too_and_the_default_limit_is_sglangs(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post("/generate/", {"text": "hi"})
        generation = frontend.fleet.submitted[-1]
    assert generation.prompt == PROMPT
    assert generation.params.num_tokens_to_generate == 128


async def test_log_probs_are_pairs_with_the_ids_that_trainers_read(tmp_path):
    body = {"input_ids": PROMPT, "return_logprob": True}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        info = (await frontend.post(GENERATE, body))["meta_info"]
        full = {"logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
        more = (await frontend.post(GENERATE, body | full))["meta_info"]
        tail = (await frontend.post(GENERATE, body | {"logprob_start_len": 1}))["meta_info"]
    y, o = byte_ids("yo")
    assert info["output_token_logprobs"] == [[log_prob_of(y), y, None], [log_prob_of(o), o, None]]
    assert "input_token_logprobs" not in info
    assert more["input_token_logprobs"] == [
        [None, PROMPT[0], "h"],
        [log_prob_of(106 + 4), 110, "i"],
    ]
    assert more["output_top_logprobs"][0] == [
        [log_prob_of(y), y, "y"],
        [log_prob_of(y) - 1, y + 1, "z"],
    ]
    assert more["input_top_logprobs"][0] is None
    assert len(more["input_top_logprobs"][1]) == 2
    assert [entry[1] for entry in tail["input_token_logprobs"]] == [PROMPT[1]]


async def test_several_prompts_or_choices_are_answered_by_a_list(tmp_path):
    batch = {"input_ids": [PROMPT, byte_ids("you")], "rid": ["a", "b"]}
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        replies: Any = await frontend.post(GENERATE, batch)
        assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b"]
        assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 3]
        assert [generation.external_id for generation in frontend.fleet.submitted] == ["a", "b"]
        one: Any = await frontend.post(GENERATE, {"text": ["hi"]})
        assert len(one) == 1
        two: Any = await frontend.post(GENERATE, {"text": "hi", "sampling_params": {"n": 2}})
        assert len(two) == 2


async def test_a_stream_tells_what_is_new_and_counts_so_far(tmp_path):
    body = {"input_ids": PROMPT, "return_logprob": True}
    async with serving(tmp_path, stops_at_eos) as frontend:
        events = await frontend.stream(GENERATE, body)
        whole = await frontend.post(GENERATE, body)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [t for event in events for t in event["output_ids"]] == whole["output_ids"]
    scores = [s for event in events for s in event["meta_info"]["output_token_logprobs"]]
    assert scores == whole["meta_info"]["output_token_logprobs"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert events[0]["meta_info"]["finish_reason"] is None


@pytest.mark.parametrize("path", [GENERATE, TOKENS])
async def test_an_aborted_generation_answers_with_its_tokens(tmp_path, path):
    never = asyncio.Event()
    steps = [Part(token_ids=byte_ids("ab"), num_cached_tokens=1, epoch=5), never]
    body = {"input_ids": PROMPT, "token_ids": PROMPT, "rid": "r", "request_id": "r"}
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        asking = asyncio.create_task(frontend.post(path, body))
        await until(lambda: bool(frontend.fleet.running))
        await frontend.http.post("/abort", json={"rid": "r"})
        reply = await asking
    if path == GENERATE:
        assert reply["output_ids"] == byte_ids("ab")
        assert reply["meta_info"]["finish_reason"] == {"type": "abort"}
        assert reply["meta_info"]["weight_version"] == "5"
        assert reply["meta_info"]["cached_tokens"] == 1
    else:
        assert reply["choices"][0]["token_ids"] == byte_ids("ab")
        assert reply["choices"][0]["finish_reason"] == "abort"
        assert reply["weight_version"] == 5


async def test_ids_and_their_log_probs_as_vllm_has_them(tmp_path):
    params = {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, "n": 2, "seed": 1}
    body = {"token_ids": PROMPT, "sampling_params": params, "request_id": "r"}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        reply = await frontend.post(TOKENS, body | {"return_weight_versions": True})
        assert frontend.fleet.submitted[0].params.num_tokens_to_generate == 3
        assert frontend.fleet.submitted[0].params.seed == 1
    assert reply["request_id"] == "r"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    choice = reply["choices"][0]
    assert choice["token_ids"] == byte_ids("yo")
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["y", "o"]
    assert choice["token_weight_versions"] == [0, 0]
    assert reply["prompt_logprobs"][0] is None
    assert reply["usage"]["completion_tokens"] == 4


async def test_a_stream_of_ids_ends_with_its_usage_when_asked(tmp_path):
    body = {"token_ids": PROMPT, "stream_options": {"include_usage": True}}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        *events, last = await frontend.stream(TOKENS, body)
    assert [t for event in events for t in event["choices"][0]["token_ids"]] == byte_ids("yo")
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {}, "input_ids"),
        (GENERATE, {"text": "x", "input_ids": [5]}, "input_ids"),
        (GENERATE, {"input_ids": [byte_id(255) + 100]}, "prompt"),
        (GENERATE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        (GENERATE, {"text": "x", "sampling_params": {"temperature": "hot"}}, "temperature"),
        (GENERATE, {"text": ["x", "y"], "sampling_params": [{}, {"n": 2}]}, "sampling_params"),
        (GENERATE, {"text": ["x", "y", "z"], "rid": ["a", "b"]}, "rid"),
        (GENERATE, {"text": "x", "top_logprobs_num": -1}, "top_logprobs_num"),
        (GENERATE, {"text": "x", "extra_key": "a", "cache_salt": "b"}, "extra_key"),
        (GENERATE, {"text": "x", "image_data": "i"}, "image_data"),
        (GENERATE, {"text": "x", "model": "nobody"}, "model"),
        (TOKENS, {}, "token_ids"),
        (TOKENS, {"token_ids": "x"}, "token_ids"),
        (TOKENS, {"token_ids": [5], "features": [1]}, "features"),
        (TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": "x"}}, "max_tokens"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(tmp_path, path, body, param):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        status = 404 if param == "model" else 400
        assert (await frontend.error(path, body, status))["param"] == param
