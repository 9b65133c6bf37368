"""What trainers want of completions and chats: weight versions, token ids, names to abort by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from homing.client import Part
from homing.frontend.openai.logprobs import completion_log_probs
from homing.frontend.text import Token
from homing.params import SamplingParams
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import LENGTH, STOP, log_prob_of, says
from tests.support.http_frontend import serving, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HI), (COMPLETIONS, {"prompt": "hi"})], ids=["chat", "completion"]
)


def across_an_update(prompt: list[int], params: SamplingParams) -> Iterator[Part]:
    """Tokens of epochs 3, 3 and 4."""
    a, b, c = byte_ids("abc")
    yield Part(token_ids=[a], num_cached_tokens=0, epoch=3)
    yield Part(token_ids=[b], epoch=3)
    yield Part(token_ids=[c], epoch=4, finish=STOP)


@BOTH
async def test_a_reply_tells_the_version_of_its_weights(tmp_path, path, body):
    def one_epoch(prompt, params):
        yield Part(token_ids=byte_ids("a"), num_cached_tokens=0, epoch=7, finish=STOP)

    async with serving(tmp_path, one_epoch) as frontend:
        reply = await frontend.post(path, body)
        events = await frontend.stream(path, body)
    assert reply["weight_version"] == events[-1]["weight_version"] == 7
    assert "oldest_weight_version" not in reply
    assert "token_weight_versions" not in reply["choices"][0]


@BOTH
async def test_tokens_from_before_and_after_an_update_are_told_apart(tmp_path, path, body):
    body = {**body, "return_weight_versions": True}
    async with serving(tmp_path, across_an_update) as frontend:
        reply = await frontend.post(path, body)
        events = await frontend.stream(path, body)
    assert (reply["oldest_weight_version"], reply["weight_version"]) == (3, 4)
    assert reply["choices"][0]["token_weight_versions"] == [3, 3, 4]
    choices = [event["choices"][0] for event in events]
    assert [v for c in choices for v in c.get("token_weight_versions", [])] == [3, 3, 4]
    assert events[-1]["weight_version"] == 4


async def test_a_score_of_a_prompt_tells_the_version_too(tmp_path):
    def score(prompt, params):
        yield Part([], num_cached_tokens=0, prompt_log_probs=[None, -1.0], epoch=2, finish=LENGTH)

    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 0}
    async with serving(tmp_path, score) as frontend:
        assert (await frontend.post(COMPLETIONS, body))["weight_version"] == 2


async def test_a_message_carries_its_tokens_on_request(tmp_path):
    fields = {"return_token_ids": True, "logprobs": True}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        message = (await frontend.post(CHAT, HI | fields))["choices"][0]["message"]
        prompt = frontend.fleet.submitted[-1].prompt
        plain = (await frontend.post(CHAT, HI))["choices"][0]["message"]
    assert message["prompt_token_ids"] == prompt
    assert message["generation_token_ids"] == byte_ids("yo")
    assert message["generation_log_probs"] == [log_prob_of(token) for token in byte_ids("yo")]
    assert plain.keys() == {"role", "content", "refusal"}


@BOTH
async def test_log_probs_name_tokens_by_id_on_request(tmp_path, path, body):
    body = {**body, "logprobs": 1 if path == COMPLETIONS else True}
    body["return_tokens_as_token_ids"] = True
    async with serving(tmp_path, says(byte_ids("y"))) as frontend:
        scores = (await frontend.post(path, body))["choices"][0]["logprobs"]
    [token] = scores["tokens"] if path == COMPLETIONS else [scores["content"][0]["token"]]
    assert token == f"token_id:{byte_ids('y')[0]}"


def test_of_alternatives_that_read_alike_the_most_probable_stays():
    """Many ids are no character by themselves, and read as the same sign."""
    token = Token(9, 0, log_prob=-3.0, top=[(7, -0.5), (8, -1.5), (5, -2.0)])
    spelling = {5: "x", 7: "?", 8: "?", 9: "?"}
    [top] = completion_log_probs(spelling.__getitem__, [token], 3).top_logprobs
    assert top == {"?": -0.5, "x": -2.0}
    [top] = completion_log_probs(str, [token], 3).top_logprobs
    assert top == {"7": -0.5, "8": -1.5, "5": -2.0, "9": -3.0}


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("named", ["header", "request_id", "rid"])
async def test_an_aborted_request_answers_with_what_it_had(tmp_path, path, body, streamed, named):
    never = asyncio.Event()
    steps = [Part(token_ids=byte_ids("ab"), num_cached_tokens=0), never]
    body = {**body, "stream": streamed}
    headers = {"X-Request-Id": "mine"} if named == "header" else {}
    if named != "header":
        body[named] = "mine"
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        asking = asyncio.create_task(frontend.http.post(path, json=body, headers=headers))
        await until(lambda: bool(frontend.fleet.running))
        assert await frontend.fleet.abort_matching("min") == 0
        assert await frontend.fleet.abort_matching("mine") == 1
        text = (await asking).text
    assert '"finish_reason":"abort"' in text
    assert '"ab"' in text


async def test_a_request_without_a_name_has_that_of_its_reply_header(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        response = await frontend.http.post(CHAT, json=HI)
        assert frontend.fleet.submitted[-1].external_id == response.headers["X-Request-Id"]


async def test_a_name_may_be_used_twice_and_its_replies_have_it(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        body = HI | {"request_id": "r1"}
        replies = await asyncio.gather(*(frontend.post(CHAT, body) for _ in range(2)))
        assert [reply["id"] for reply in replies] == ["chatcmpl-r1"] * 2
        error = await frontend.error(CHAT, HI | {"rid": "x" * 257}, 400)
        assert error["param"] == "rid"


@BOTH
async def test_priority_and_a_time_limit_go_with_the_request(tmp_path, path, body):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(path, body | {"priority": -2, "timeout_s": 1.5})
        await frontend.post(path, body)
        urgent, plain = frontend.fleet.submitted
    assert (urgent.priority, urgent.timeout_s) == (-2, pytest.approx(1.5, abs=0.5))
    assert (plain.priority, plain.timeout_s) == (0, None)


async def test_messages_beside_a_prompt_of_ids_are_messages_all_the_same(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        body = {"messages": [{}], "prompt_token_ids": [98]}
        error = await frontend.error("/v1/chat/completions", body, 400)
        assert error["param"] == "messages"
        body = {"messages": [], "prompt_token_ids": [98]}
        answer = await frontend.post("/v1/chat/completions", body)
        assert answer["usage"]["prompt_tokens"] == 1
