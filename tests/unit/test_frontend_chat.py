"""/v1/chat/completions over HTTP, whole and streamed."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import force_setattr

from homing.wire import Finish, FinishReason
from tests.support.byte_model import ALTERNATING_TEMPLATE, byte_id, byte_ids
from tests.support.fake_fleet import log_prob_of, parts, says
from tests.support.http_frontend import serving

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CONTENTS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
VARIABLES = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents }}|{{ messages | length }}"


async def prompt_text(frontend, body):
    """The prompt that the fleet is given for a request."""
    await frontend.post(URL, body)
    return bytes(token - byte_id(0) for token in frontend.fleet.submitted[-1].prompt).decode()


async def test_a_chat_completion_has_the_shape_of_openai(tmp_path):
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        body = await frontend.post(URL, {"messages": HI})
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "yo", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["completion_tokens"] == 2


async def test_a_stream_tells_the_role_first_then_the_text_then_why_it_ended(tmp_path):
    async with serving(tmp_path, says(byte_ids("y😀"))) as frontend:
        events = await frontend.stream(URL, {"messages": HI})
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * 3
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "y"},
        {"content": "😀"},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert len({event["id"] for event in events}) == 1


async def test_a_stream_of_one_token_says_that_the_limit_ended_it(tmp_path):
    async with serving(tmp_path, says(byte_ids("yes"))) as frontend:
        events = await frontend.stream(URL, {"messages": HI, "max_tokens": 1})
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"][0]["delta"] == {"content": "y"}


async def test_an_end_without_text_is_a_chunk_of_its_own(tmp_path):
    script = says([*byte_ids("y"), 2], finish=Finish(FinishReason.STOP, stop=2))
    async with serving(tmp_path, script) as frontend:
        events = await frontend.stream(URL, {"messages": HI})
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] is None


async def test_each_choice_has_its_role_and_its_end_when_it_ends(tmp_path):
    gate = asyncio.Event()

    def of_seed(prompt, params):
        if params.seed == 0:
            yield gate
        yield from parts(prompt, params, byte_ids("abc"[: params.seed + 1]))

    body = {"messages": HI, "n": 3, "seed": 0}
    async with serving(tmp_path, of_seed) as frontend:
        ended = []
        async for event in frontend.events(URL, body):
            [choice] = event["choices"]
            if choice["finish_reason"]:
                ended.append(choice["index"])
                if len(ended) == 2:
                    gate.set()  # the slowest choice begins after the others have ended
    assert ended == [1, 2, 0]


async def test_log_probs_give_text_and_bytes_and_the_alternatives_asked_for(tmp_path):
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    async with serving(tmp_path, says(byte_ids("é"))) as frontend:
        whole = (await frontend.post(URL, body))["choices"][0]["logprobs"]
        events = await frontend.stream(URL, body)
        none = (await frontend.post(URL, {"messages": HI, "logprobs": True}))["choices"][0]
    first, second = byte_ids("é")
    assert [entry["bytes"] for entry in whole["content"]] == [[0xC3], [0xA9]]
    assert [entry["logprob"] for entry in whole["content"]] == [
        log_prob_of(first),
        log_prob_of(second),
    ]
    assert [top["bytes"] for top in whole["content"][0]["top_logprobs"]] == [[0xC3], [0xC4]]
    streamed = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert [entry for chunk in streamed for entry in chunk["content"]] == whole["content"]
    assert none["logprobs"]["content"][0]["top_logprobs"] == []


async def test_alternatives_that_are_barred_have_a_finite_floor(tmp_path):
    def barred(prompt, params):
        [part] = parts(prompt, params, byte_ids("x"))
        force_setattr(part, "top", [[(byte_id(120), 0.0), (byte_id(98), float("-inf"))]])
        return [part]

    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "logit_bias": {"7": -100}}
    async with serving(tmp_path, barred) as frontend:
        [entry] = (await frontend.post(URL, body))["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, -9999.0]


async def test_ids_of_prompt_and_answer_come_on_request(tmp_path):
    body = {"messages": HI, "return_token_ids": True}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        whole = await frontend.post(URL, body)
        events = await frontend.stream(URL, body)
        prompt = frontend.fleet.submitted[0].prompt
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == byte_ids("yo")
    streamed = [t for e in events for c in e["choices"] for t in c.get("token_ids", [])]
    assert streamed == byte_ids("yo")


async def test_prompt_log_probs_are_beside_the_choices_and_streamed_once(tmp_path):
    body = {"messages": HI, "prompt_logprobs": 1}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        whole = await frontend.post(URL, body)
        events = await frontend.stream(URL, body)
        assert len(whole["prompt_logprobs"]) == len(frontend.fleet.submitted[0].prompt)
    streamed = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    assert streamed == [whole["prompt_logprobs"]]
    assert whole["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
async def test_contents_are_texts_nulls_or_parts(tmp_path, content, expected):
    async with serving(tmp_path, says(byte_ids("yo")), chat_template=CONTENTS) as frontend:
        messages = [{"role": "user", "content": content}]
        assert await prompt_text(frontend, {"messages": messages}) == f"[user:{expected}]"
        absent = [{"role": "user"}, *HI]
        assert await prompt_text(frontend, {"messages": absent}) == "[user:][user:hi]"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": [{"type": "foo"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x", 1]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": {}}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        ["hi"],
        "hi",
    ],
)
async def test_messages_that_are_none_are_refused(tmp_path, messages):
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        assert (await frontend.error(URL, {"messages": messages}, 400))["param"] == "messages"


async def test_a_chat_with_earlier_tool_calls_and_no_content_is_answered(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }})"
        "{% endfor %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
        {"role": "assistant", "tool_calls": []},
    ]
    async with serving(tmp_path, says(byte_ids("yo")), chat_template=template) as frontend:
        text = await prompt_text(frontend, {"messages": messages})
    assert text == "user:hi;assistant:f(3);tool:9;assistant:;"


async def test_what_the_template_objects_to_is_told_to_the_client(tmp_path):
    async with serving(
        tmp_path, says(byte_ids("yo")), chat_template=ALTERNATING_TEMPLATE
    ) as frontend:
        error = await frontend.error(URL, {"messages": HI * 2}, 400)
        assert "roles must alternate" in error["message"]
        await frontend.post(URL, {"messages": HI})


async def test_a_model_without_a_template_says_so_and_still_completes(tmp_path):
    async with serving(tmp_path, says(byte_ids("yo")), chat_template=None) as frontend:
        error = await frontend.error(URL, {"messages": HI}, 400)
        assert "no chat template" in error["message"]
        await frontend.post("/v1/completions", {"prompt": "x"})


async def test_template_variables_reach_the_template(tmp_path):
    body = {
        "messages": HI,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"text": "d"}],
    }
    async with serving(tmp_path, says(byte_ids("yo")), chat_template=VARIABLES) as frontend:
        assert await prompt_text(frontend, body) == "False|low|[{'text': 'd'}]|1"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
async def test_template_variables_may_not_replace_the_requests_own(tmp_path, name):
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        body = {"messages": HI, "chat_template_kwargs": {name: []}}
        assert (await frontend.error(URL, body, 400))["param"] == "chat_template_kwargs"


async def test_a_request_may_not_bring_a_template(tmp_path):
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        body = {"messages": HI, "chat_template": "x"}
        assert (await frontend.error(URL, body, 400))["param"] == "chat_template"


async def test_the_final_message_is_continued_on_request(tmp_path):
    template = CONTENTS + "{% if add_generation_prompt %}[assistant:{% endif %}"
    messages = [*HI, {"role": "assistant", "content": "fine "}]
    async with serving(tmp_path, says(byte_ids("yo")), chat_template=template) as frontend:
        body = {"messages": messages, "continue_final_message": True}
        assert await prompt_text(frontend, body) == "[user:hi][assistant:fine "
        without = {"messages": HI, "add_generation_prompt": False}
        assert await prompt_text(frontend, without) == "[user:hi]"
        assert await prompt_text(frontend, {"messages": HI}) == "[user:hi][assistant:"
        both = {**body, "add_generation_prompt": True}
        error = await frontend.error(URL, both, 400)
        assert error["param"] == "continue_final_message"


async def test_a_chat_that_does_not_fit_the_context_is_refused_and_says_so(tmp_path):
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        for content in ("x" * 256, "x" * 1_000_000):
            body = {"messages": [{"role": "user", "content": content}]}
            error = await frontend.error(URL, body, 400)
            assert "maximum context length" in error["message"]


async def test_a_template_that_writes_nothing_is_refused(tmp_path):
    async with serving(tmp_path, says(byte_ids("yo")), chat_template="{# #}") as frontend:
        await frontend.error(URL, {"messages": HI}, 400)
