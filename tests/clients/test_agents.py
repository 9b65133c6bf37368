"""langchain-openai and instructor against a frontend, as agents use them; skipped where they are
not installed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from homing.params import JsonSchema, SamplingParams
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import parts, says
from tests.support.http_frontend import Frontend, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages

TEMPLATE = (
    "{{ 'Call by <tool_call>: ' ~ (tools | tojson) if tools else '' }}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def answers_as_asked(prompt: list[int], params: SamplingParams) -> Any:
    """A call where one is required or would help, and a sentence otherwise."""
    shape = params.structured_output
    if isinstance(shape, JsonSchema):
        is_list = json.loads(shape.schema).get("type") == "array"
        arguments = '{"city":"Oslo","days":3}'
        text = f'[{{"name":"Trip","arguments":{arguments}}}]' if is_list else arguments
    else:
        text = '<tool_call>{"name": "Trip", "arguments": {"city": "Oslo", "days": 3}}</tool_call>'
    return parts(prompt, params, byte_ids(text))


def base_url(frontend: Frontend) -> str:
    return f"http://{frontend.host}:{frontend.port}/v1"


async def test_langchain_chats_streams_and_calls_tools(tmp_path):
    chat_models = pytest.importorskip("langchain_openai")
    pydantic = pytest.importorskip("pydantic")

    class Trip(pydantic.BaseModel):
        """Plan a trip."""

        city: str
        days: int

    def model(kind: str, frontend: Frontend, http: httpx.AsyncClient) -> Any:
        # A client of our own, since nothing closes theirs.
        options = {"api_key": "-", "model": "fake", "http_async_client": http}
        return getattr(chat_models, kind)(base_url=base_url(frontend), **options)

    async with (
        serving(tmp_path / "a", says(byte_ids("héllo 😀")), max_context_tokens=1024) as frontend,
        httpx.AsyncClient(verify=False) as http,
    ):
        chat = model("ChatOpenAI", frontend, http)
        assert (await chat.ainvoke("hi")).content == "héllo 😀"
        pieces = [piece.content async for piece in chat.astream("hi")]
        assert "".join(pieces) == "héllo 😀"
        llm = model("OpenAI", frontend, http)
        assert await llm.ainvoke("hi") == "héllo 😀"
    async with (
        serving(
            tmp_path / "b", answers_as_asked, chat_template=TEMPLATE, max_context_tokens=8192
        ) as frontend,
        httpx.AsyncClient(verify=False) as http,
    ):
        chat = model("ChatOpenAI", frontend, http)
        for choice in ("auto", "any", "Trip"):
            reply = await chat.bind_tools([Trip], tool_choice=choice).ainvoke("hi")
            assert [call["args"] for call in reply.tool_calls] == [{"city": "Oslo", "days": 3}]
        chunks = [chunk async for chunk in chat.bind_tools([Trip]).astream("hi")]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.tool_calls[0]["args"] == {"city": "Oslo", "days": 3}
        for method in ("json_schema", "function_calling"):
            trip = await chat.with_structured_output(Trip, method=method).ainvoke("hi")
            assert trip == Trip(city="Oslo", days=3)


async def test_instructor_gets_what_it_asks_for(tmp_path):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")

    class Trip(pydantic.BaseModel):
        city: str
        days: int

    async with serving(
        tmp_path, answers_as_asked, chat_template=TEMPLATE, max_context_tokens=8192
    ) as frontend:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
            async with openai.AsyncOpenAI(base_url=base_url(frontend), api_key="-") as plain:
                client = instructor.from_openai(plain, mode=mode)
                trip = await asyncio.wait_for(
                    client.chat.completions.create(
                        model="fake",
                        response_model=Trip,
                        messages=[{"role": "user", "content": "Plan a trip."}],
                    ),
                    60,
                )
            assert trip.model_dump() == {"city": "Oslo", "days": 3}


async def test_openai_parses_what_fits_a_model(tmp_path):
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")

    class Trip(pydantic.BaseModel):
        city: str
        days: int

    async with (
        serving(
            tmp_path, answers_as_asked, chat_template=TEMPLATE, max_context_tokens=8192
        ) as frontend,
        openai.AsyncOpenAI(base_url=base_url(frontend), api_key="-") as client,
    ):
        arguments: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": "Plan a trip."}],
        }
        reply = await client.chat.completions.parse(**arguments, response_format=Trip)
        assert reply.choices[0].message.parsed == Trip(city="Oslo", days=3)
        tool = openai.pydantic_function_tool(Trip)
        reply = await client.chat.completions.parse(
            **arguments, tools=[tool], tool_choice="required"
        )
        [call] = reply.choices[0].message.tool_calls
        assert call.function.parsed_arguments == Trip(city="Oslo", days=3)
        async with client.chat.completions.stream(
            **arguments, tools=[tool], tool_choice="required"
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Trip(
            city="Oslo", days=3
        )
