"""/tokenize and /detokenize over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from homing.frontend import token_routes
from tests.support.byte_model import BOS, IM_END, byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/tokenize/"])
async def test_a_text_is_tokenized_as_a_prompt_is(tmp_path, path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        body = await frontend.post(path, {"model": "fake", "prompt": "hé"})
        await frontend.post("/v1/completions", {"prompt": "hé"})
        assert body == {
            "count": 3,
            "max_model_len": 256,
            "tokens": frontend.fleet.submitted[-1].prompt,
            "token_strs": None,
        }


async def test_a_chat_is_tokenized_as_its_completion_is(tmp_path):
    fields = {"messages": HI, "add_generation_prompt": False}
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        for chat in ({"messages": HI}, fields):
            body = await frontend.post("/tokenize", chat)
            await frontend.post("/v1/chat/completions", chat)
            assert body["tokens"] == frontend.fleet.submitted[-1].prompt


async def test_tokens_are_spelled_on_request(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        body = await frontend.post("/tokenize", {"prompt": " wé", "return_token_strs": True})
    assert body["token_strs"] == [" w", "bytes:\\xc3", "bytes:\\xa9"]


async def test_what_was_tokenized_comes_back_with_its_special_tokens(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        text = "<|bos|>héllo 😀<|im_end|>"
        tokens = (await frontend.post("/tokenize", {"prompt": text}))["tokens"]
        assert (tokens[0], tokens[-1]) == (BOS, IM_END)
        assert await frontend.post("/detokenize", {"tokens": tokens}) == {"prompt": text}
        plain = {"tokens": tokens, "skip_special_tokens": True}
        assert await frontend.post("/v1/detokenize", plain) == {"prompt": "héllo 😀"}
        assert await frontend.post("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 101}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(
    tmp_path, monkeypatch, path, body, param
):
    monkeypatch.setattr(token_routes, "MAX_CHARACTERS", 100)
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.error(path, body, 400))["param"] == param


async def test_64_at_once_give_what_one_at_a_time_gives(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:

        async def tokens(n: int) -> list[int]:
            special = {"prompt": f"hello {n}", "add_special_tokens": n % 2 == 0}
            return (await frontend.post("/tokenize", special))["tokens"]

        one_by_one = [await tokens(n) for n in range(64)]
        assert await asyncio.gather(*map(tokens, range(64))) == one_by_one
