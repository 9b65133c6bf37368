"""/v1/completions over HTTP, whole and streamed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from homing.frontend import completions
from homing.frontend.openai.requests import read_completion
from homing.frontend.tokenizing import TokenizerThread
from homing.wire import Finish, FinishReason
from tests.support.byte_model import BOS, EOS, byte_id, byte_ids
from tests.support.fake_fleet import parts, says
from tests.support.http_frontend import serving, strict_json

URL = "/v1/completions"


def text_of(events, index=0):
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_a_completion_has_the_shape_of_openai(tmp_path):
    async with serving(tmp_path, says(byte_ids("hi"), num_cached_tokens=16)) as frontend:
        body = await frontend.post(URL, {"model": "fake", "prompt": "abc", "max_tokens": 5})
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("path", [URL, "/completions", URL + "/", "/completions/"])
async def test_the_path_may_lack_its_version_and_end_in_a_slash(tmp_path, path):
    async with serving(tmp_path, says(byte_ids("hi"))) as frontend:
        assert (await frontend.post(path, {"prompt": "x"}))["choices"][0]["text"] == "hi"


async def test_a_stream_says_what_the_whole_answer_says(tmp_path):
    body = {"prompt": "x", "max_tokens": 40, "logprobs": 2, "echo": True, "return_token_ids": True}
    answer = byte_ids("né 😀 fin")
    async with serving(tmp_path, says(answer)) as frontend:
        whole = (await frontend.post(URL, body))["choices"][0]
        events = await frontend.stream(URL, body)
    choices = [event["choices"][0] for event in events]
    assert text_of(events) == whole["text"] == "xné 😀 fin"
    for name, values in whole["logprobs"].items():
        assert [v for choice in choices for v in choice["logprobs"][name]] == values
    assert [t for choice in choices for t in choice["token_ids"]] == whole["token_ids"] == answer
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == byte_ids("x")
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({event["id"] for event in events}) == 1


async def test_every_chunk_before_the_last_has_text(tmp_path):
    async with serving(tmp_path, says(byte_ids("😀EN😀"))) as frontend:
        events = await frontend.stream(URL, {"prompt": "x", "stop": ["END"]})
    assert [event["choices"][0]["text"] for event in events] == ["😀", "EN😀"]


async def test_nothing_of_a_stop_word_is_streamed(tmp_path):
    finish = Finish(FinishReason.STOP, stop="END")
    async with serving(tmp_path, says(byte_ids("aEND"), finish=finish)) as frontend:
        events = await frontend.stream(URL, {"prompt": "x", "stop": "END"})
        included = await frontend.post(
            URL, {"prompt": "x", "stop": "END", "include_stop_str_in_output": True}
        )
    assert text_of(events) == "a"
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    assert included["choices"][0]["text"] == "aEND"


async def test_each_prompt_of_a_list_has_its_n_choices_in_order(tmp_path):
    def repeat(prompt, params):
        return parts(prompt, params, [*prompt, byte_id(ord("0") + params.seed)])

    body = {"prompt": ["a", "b", "c"], "n": 2, "seed": 4}
    async with serving(tmp_path, repeat) as frontend:
        whole = await frontend.post(URL, body)
        events = await frontend.stream(URL, body)
    expected = ["a4", "a5", "b4", "b5", "c4", "c5"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [text_of(events, index) for index in range(6)] == expected
    finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finished) == list(range(6))


async def test_seeds_of_choices_wrap_around_at_64_bits(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(URL, {"prompt": "x", "n": 2, "seed": 2**63 - 1})
        assert [g.params.seed for g in frontend.fleet.submitted] == [2**63 - 1, -(2**63)]


async def test_a_prompt_is_counted_once_for_its_choices_and_every_answer_is(tmp_path):
    script = says(byte_ids("abcdefgh"), num_cached_tokens=1)
    body = {"prompt": ["xy", "z"], "n": 4, "max_tokens": 5, "ignore_eos": True}
    async with serving(tmp_path, script) as frontend:
        usage = (await frontend.post(URL, body))["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == 43
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [byte_ids("ab")]),
        (["ab", "c"], [byte_ids("ab"), byte_ids("c")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["ab", [9]], [byte_ids("ab"), [9]]),
        ("", [[BOS]]),
        ("a<|eos|>", [[*byte_ids("a"), EOS]]),
    ],
)
async def test_prompts_come_as_text_or_ids_one_or_many(tmp_path, prompt, expected):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(URL, {"prompt": prompt})
        assert [generation.prompt for generation in frontend.fleet.submitted] == expected


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], [1, "a"], [1, [2]], [-1], [300], [2**40]])
async def test_prompts_that_are_none_are_refused(tmp_path, prompt):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        error = await frontend.error(URL, {"prompt": prompt}, 400)
        assert error["param"] == "prompt"
        assert (await frontend.post(URL, {"prompt": "x"}))["choices"][0]["text"] == "x"


async def test_an_empty_prompt_needs_a_model_with_a_bos_token(tmp_path):
    async with serving(tmp_path, says(byte_ids("x")), bos=False) as frontend:
        assert "empty" in (await frontend.error(URL, {"prompt": ""}, 400))["message"]


async def test_too_many_choices_are_refused_before_any_starts(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.error(URL, {"prompt": ["x"] * 100, "n": 100}, 400)
        assert frontend.fleet.submitted == []


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([5] * 257, {}),
        ([5] * 254, {"max_tokens": 10}),
        ("x" * 257, {}),
        ("x" * 1_000_000, {}),
    ],
)
async def test_what_does_not_fit_the_context_is_refused_and_says_so(tmp_path, prompt, fields):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        error = await frontend.error(URL, {"prompt": prompt, **fields}, 400)
        assert "maximum context length" in error["message"]
        assert error["code"] == "context_length_exceeded"


async def test_echo_without_log_probs_gives_the_prompt_as_it_was_written(tmp_path):
    async with serving(tmp_path, says(byte_ids("!"))) as frontend:
        body = {"prompt": "a<|eos|>", "echo": True}
        assert (await frontend.post(URL, body))["choices"][0]["text"] == "a<|eos|>!"
        assert text_of(await frontend.stream(URL, body)) == "a<|eos|>!"


async def test_cache_salts_reach_the_fleet_and_may_not_be_long(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        await frontend.post(URL, {"prompt": "x", "cache_salt": "tenant"})
        assert frontend.fleet.submitted[0].cache_salt == "tenant"
        error = await frontend.error(URL, {"prompt": "x", "cache_salt": "s" * 65}, 400)
        assert error["param"] == "cache_salt"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
async def test_ids_outside_the_vocabulary_are_refused(tmp_path, field):
    value = {"99999999": 1} if field == "logit_bias" else [99999999]
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.error(URL, {"prompt": "x", field: value}, 400))["param"] == field


async def test_an_aborted_answer_is_kept_as_far_as_it_came(tmp_path):
    script = says(byte_ids("par"), finish=Finish(FinishReason.ABORT))
    async with serving(tmp_path, script) as frontend:
        choice = (await frontend.post(URL, {"prompt": "x"}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("par", "abort")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, 0),
        ({}, 0),
        ({"include_usage": False}, 0),
        ({"include_usage": None}, 0),
        ({"continuous_usage_stats": True}, 0),
        ({"include_usage": True}, 1),
    ],
)
async def test_usage_is_in_one_last_chunk_without_choices_if_asked_for(tmp_path, options, expected):
    async with serving(tmp_path, says(byte_ids("hi"))) as frontend:
        events = await frontend.stream(URL, {"prompt": "x", "stream_options": options})
    with_usage = [event for event in events if event.get("usage")]
    assert len(with_usage) == expected
    if expected:
        assert with_usage == events[-1:]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 2


async def test_usage_may_be_on_every_chunk(tmp_path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(tmp_path, says(byte_ids("hi"))) as frontend:
        events = await frontend.stream(URL, {"prompt": "x", "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]


async def test_64_parallel_requests_have_the_ids_of_a_serial_run(tmp_path):
    """Of the kind of "Already borrowed"."""
    async with serving(tmp_path, lambda p, s: parts(p, s, p[:1])) as frontend:
        bodies = [{"prompt": f"hello {i}", "return_token_ids": True} for i in range(64)]

        async def ids(body):
            return (await frontend.post(URL, body))["choices"][0]["prompt_token_ids"]

        parallel = await asyncio.gather(*map(ids, bodies))
        assert parallel == [await ids(body) for body in bodies]


async def test_a_body_needs_no_content_type(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        for headers in ({}, {"Content-Type": "text/plain"}):
            response = await frontend.http.post(URL, content=b'{"prompt": "x"}', headers=headers)
            assert strict_json(response.text)["choices"][0]["text"] == "x"


async def test_a_long_body_is_taken_apart_by_the_thread(tmp_path, monkeypatch):
    threads = []

    def noting_read(body):
        threads.append(threading.current_thread())
        return read_completion(body)

    monkeypatch.setattr(completions, "read_completion", noting_read)
    async with serving(tmp_path, says(byte_ids("x")), max_context_tokens=2**20) as frontend:
        for num_ids in (5, 5000):
            answer = await frontend.post(URL, {"prompt": [98] * num_ids, "return_token_ids": True})
            assert answer["choices"][0]["prompt_token_ids"] == [98] * num_ids
    assert threads[0] is threading.main_thread() is not threads[1]


async def test_a_short_prompt_does_not_wait_for_long_ones_to_be_tokenized(tmp_path, monkeypatch):
    gate, run = asyncio.Event(), TokenizerThread.run

    async def run_later(thread, job):
        await gate.wait()
        return await run(thread, job)

    monkeypatch.setattr(TokenizerThread, "run", run_later)
    async with serving(tmp_path, says(byte_ids("x")), max_context_tokens=2**20) as frontend:
        long = asyncio.create_task(frontend.post(URL, {"prompt": "a" * 5000}))
        short = await frontend.post(URL, {"prompt": "a"})
        assert short["choices"][0]["text"] == "x"
        assert not long.done()
        gate.set()
        assert (await long)["usage"]["prompt_tokens"] >= 5000
