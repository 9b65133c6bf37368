"""Structured output on the demo model, through two engines, asked for by the openai package."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.support.http_frontend import strict_json
from tests.support.serving import Serving, serving
from tests.support.structured import SCHEMAS, closed

pytestmark = pytest.mark.timeout(600)

MODEL = "SmolLM2-135M-Instruct"
USER: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Describe a person from Paris who collects stamps."}
]


class Place(BaseModel):
    city: str = Field(max_length=20)
    country: Literal["France", "Germany", "España"]


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    home: Place | None
    hobbies: list[str] = Field(max_length=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--data-parallel-size", "2") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0) as client:
        yield client


def json_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def ask(client: openai.OpenAI, **options: Any) -> str:
    reply = client.chat.completions.create(
        model=MODEL, messages=USER, seed=5, max_tokens=300, **options
    )
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content or ""


def test_parse_returns_the_object_that_was_asked_for(client: openai.OpenAI):
    reply = client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Person, seed=1, n=4, max_tokens=300
    )
    people = [choice.message.parsed for choice in reply.choices if choice.finish_reason == "stop"]
    assert len(people) >= 3  # a free string may run on to the limit
    assert all(isinstance(person, Person) for person in people)


def test_a_stream_carries_the_same_json(client: openai.OpenAI):
    response_format = json_format(SCHEMAS["strings"])
    whole = ask(client, response_format=response_format)
    jsonschema.validate(json.loads(whole), SCHEMAS["strings"])
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        seed=5,
        max_tokens=300,
        stream=True,
        response_format=response_format,
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(deltas) > 10
    assert "".join(deltas) == whole


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["Paris", "Lyon"]}}, "Paris|Lyon"),
        ({"guided_regex": r"(\d{2}\.){2}19\d\d"}, r"(\d{2}\.){2}19\d\d"),
        ({"ebnf": 'root ::= "<" [a-z]{1,9} (root ">" | ">")'}, r"(<[a-z]+)+>+"),
        ({"structured_outputs": {"grammar": 'start: "é"~2 | "ß"'}}, "éé|ß"),
    ],
    ids=["choice", "regex", "gbnf", "lark"],
)
def test_patterns_choices_and_grammars_hold(client: openai.OpenAI, extra: Any, pattern: str):
    for temperature in (0.0, 1.5):
        assert re.fullmatch(pattern, ask(client, extra_body=extra, temperature=temperature))


def test_json_object_gives_an_object(client: openai.OpenAI):
    prompt = 'JSON of one book, briefly: {"title": "Dune", "year": 1965}. Another:'
    reply = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=60,
        temperature=0,
        extra_body={"response_format": {"type": "json_object"}},
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(reply.choices[0].text), dict)


def test_log_probs_beside_a_grammar_are_json_and_the_models_own(client: openai.OpenAI):
    """What the grammar bars has probability still: never minus infinity."""
    reply = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=USER,
        response_format=json_format(SCHEMAS["enums"]),
        logprobs=True,
        top_logprobs=5,
        seed=3,
        max_tokens=100,
    )
    [choice] = strict_json(reply.text)["choices"]
    entries = choice["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries[:-1])
    assert data.decode() == choice["message"]["content"]
    first = entries[0]
    assert first["token"] == "{"
    assert first["logprob"] < first["top_logprobs"][0]["logprob"]  # it would rather have talked
    assert first["top_logprobs"][0]["token"] != "{"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_a_400_with_the_reason(
    client: openai.OpenAI, stream: bool
):
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            response_format=json_format({"type": "array", "uniqueItems": True}),
            max_tokens=10,
            stream=stream,
        )
    assert caught.value.param == "response_format"


async def test_streams_with_many_grammars_survive_the_death_of_an_engine(
    server: Serving, client: openai.OpenAI
):
    """Half of them lose their engine amid the answer; all end with the undisturbed text."""
    names = ["nested objects", "strings", "numbers", "names of several bytes"]
    formats = [json_format(closed(one=SCHEMAS[name])) for name in names]
    expected = [ask(client, response_format=response_format) for response_format in formats]
    started = asyncio.Event()

    async def stream(number: int) -> str:
        text = ""
        async for chunk in await http.chat.completions.create(
            model=MODEL,
            messages=USER,
            seed=5,
            max_tokens=300,
            stream=True,
            response_format=formats[number % len(formats)],
            extra_body={"cache_salt": str(number)},  # else all would go to one engine
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if len(text) > 5:
                started.set()
        return text

    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="x") as http:
        streams = [asyncio.create_task(stream(number)) for number in range(12)]
        await asyncio.wait_for(started.wait(), 60)
        server.kill("engine")
        texts = await asyncio.gather(*streams)
    assert texts == 3 * expected
    assert server.metric("homing_requests_resubmitted_total") >= 1
    for name, text in zip(names, texts, strict=False):
        jsonschema.validate(json.loads(text), closed(one=SCHEMAS[name]))
