"""Each parameter of a request changes what the demo model answers, in the way that it should."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import Serving, serving

pytestmark = pytest.mark.timeout(600)

Choice = dict[str, Any]

PROMPT = {"prompt": "The capital of France is", "max_tokens": 6}
QUESTION = "What is the capital of France? One word."
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 10}
ALWAYS = {"temperature": 0, "return_token_ids": True}
SEVEN = {"type": "json_schema", "json_schema": {"name": "seven", "schema": {"enum": [7]}}}
DRAWN = {"temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--frontend-replicas", "1", "--kv-cache-gb", "0.5") as running:
        yield running


@pytest.fixture(scope="module")
def ask(server: Serving) -> Callable[..., dict[str, Any]]:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = httpx.post(server.base_url + path, json=ALWAYS | body, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return post


@pytest.fixture(scope="module")
def complete(ask: Any) -> Callable[..., dict[str, Any]]:
    return lambda **fields: ask("/v1/completions", PROMPT | fields)


@pytest.fixture(scope="module")
def chat(ask: Any) -> Callable[..., dict[str, Any]]:
    return lambda **fields: ask("/v1/chat/completions", CHAT | fields)


@pytest.fixture(scope="module")
def plain(complete: Any) -> Choice:
    """What the model completes when nothing more is asked for."""
    return complete()["choices"][0]


@pytest.fixture(scope="module")
def plain_chat(chat: Any) -> Choice:
    return chat()["choices"][0]


def test_what_is_compared_with(plain, plain_chat):
    assert plain["text"].startswith(" Paris.")
    assert plain["finish_reason"] == "length"
    assert plain_chat["message"]["content"] == "The capital of France is Paris."
    assert plain_chat["finish_reason"] == "stop"


def test_max_tokens_ends_it_sooner(complete, chat, plain, plain_chat):
    assert complete(max_tokens=2)["choices"][0]["token_ids"] == plain["token_ids"][:2]
    # Where a chat gives both, the newer name holds.
    shorter = chat(max_tokens=4, max_completion_tokens=3)["choices"][0]
    assert shorter["token_ids"] == plain_chat["token_ids"][:3]


def test_n_gives_so_many_that_differ_by_their_seeds(complete):
    choices = complete(n=3, **DRAWN)["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    [second] = complete(**DRAWN | {"seed": DRAWN["seed"] + 1})["choices"]
    assert second["token_ids"] == choices[1]["token_ids"]


def test_temperature_and_seed_draw_other_tokens_and_the_same_again(complete, plain):
    drawn, again, otherwise = (complete(**DRAWN | {"seed": seed}) for seed in (3, 3, 4))
    texts = [reply["choices"][0]["text"] for reply in (drawn, again, otherwise)]
    assert texts[0] == texts[1]
    assert len({*texts, plain["text"]}) == 3


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-4}, {"top_p": 0}, {"min_p": 1}])
def test_truncation_leaves_the_most_probable_token(complete, plain, fields):
    assert complete(**DRAWN, **fields)["choices"][0]["text"] == plain["text"]


@pytest.fixture(scope="module")
def refrain(complete: Any) -> Callable[..., int]:
    """How many different tokens there are in 12 that the model would rather repeat."""

    def count(**fields: Any) -> int:
        reply = complete(prompt="la la la la la la la la", max_tokens=12, **fields)
        return len(set(reply["choices"][0]["token_ids"]))

    return count


@pytest.fixture(scope="module")
def plain_refrain(refrain: Any) -> int:
    return refrain()


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 5}, {"presence_penalty": 2}, {"frequency_penalty": 2}]
)
def test_penalties_keep_tokens_from_coming_again(refrain, plain_refrain, fields):
    assert refrain(**fields) > plain_refrain


def test_logit_bias_bars_a_token_or_makes_it_certain(complete, plain):
    first = plain["token_ids"][0]
    barred = complete(logit_bias={first: -100})["choices"][0]
    assert barred["token_ids"][0] != first
    certain = complete(logit_bias={first: 100})["choices"][0]
    assert set(certain["token_ids"]) == {first}


def test_only_allowed_token_ids_are_generated(complete, plain):
    allowed = plain["token_ids"][1:3]
    [choice] = complete(allowed_token_ids=allowed)["choices"]
    assert set(choice["token_ids"]) <= set(allowed)


def test_bad_words_are_not_in_the_text(complete, plain):
    assert "Paris" in plain["text"]
    [choice] = complete(bad_words=["Paris"])["choices"]
    assert "Paris" not in choice["text"]
    assert choice["token_ids"][0] != plain["token_ids"][0]


def test_a_stop_string_ends_it_and_may_be_kept(complete):
    [choice] = complete(stop="is.")["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" Par", "stop")
    assert choice["stop_reason"] == "is."
    [kept] = complete(stop=["is.", "x"], include_stop_str_in_output=True)["choices"]
    assert kept["text"] == " Paris."


def test_a_stop_id_ends_it(complete, plain):
    second = plain["token_ids"][1]
    [choice] = complete(stop_token_ids=[second])["choices"]
    assert (choice["text"], choice["stop_reason"]) == (" Paris", second)


def test_ends_may_be_ignored_or_put_off_and_control_tokens_shown(chat, plain_chat):
    [longer] = chat(ignore_eos=True)["choices"]
    assert len(longer["token_ids"]) == 10
    assert longer["token_ids"][:8] == plain_chat["token_ids"]
    [shown] = chat(ignore_eos=True, skip_special_tokens=False)["choices"]
    assert "<|im_end|>" in shown["message"]["content"]
    assert "<|im_end|>" not in longer["message"]["content"]
    [late] = chat(min_tokens=10)["choices"]
    assert len(late["token_ids"]) == 10
    assert late["token_ids"][7] != plain_chat["token_ids"][7]


def test_log_probs_are_those_of_what_was_chosen(complete, chat, plain):
    scores = complete(logprobs=2)["choices"][0]["logprobs"]
    assert "".join(scores["tokens"]) == plain["text"]
    assert scores["token_logprobs"] == [max(top.values()) for top in scores["top_logprobs"]]
    entries = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    [named] = complete(logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in plain["token_ids"]]


def test_a_prompt_is_scored_by_echo_or_by_its_name(complete):
    [echoed] = complete(echo=True, logprobs=0, max_tokens=0)["choices"]
    assert echoed["text"] == PROMPT["prompt"]
    [scored] = complete(prompt_logprobs=0)["choices"]
    of_prompt = zip(scored["prompt_token_ids"], scored["prompt_logprobs"], strict=True)
    by_name = [None if top is None else top[str(token)]["logprob"] for token, top in of_prompt]
    by_echo = echoed["logprobs"]["token_logprobs"]
    assert by_echo[0] is by_name[0] is None
    assert by_echo[1:] == pytest.approx(by_name[1:], abs=1e-5)
    assert math.fsum(by_echo[1:]) < 0


def test_prompts_of_ids_are_those_of_their_texts(complete, plain):
    ids = plain["prompt_token_ids"]
    reply = complete(prompt=[ids, ids[:-1]])
    assert reply["choices"][0]["text"] == plain["text"]
    assert reply["choices"][1]["text"] != plain["text"]
    assert reply["usage"]["prompt_tokens"] == 2 * len(ids) - 1


def test_another_salt_shares_no_prefix(complete):
    def cached(salt: str | None) -> int:
        usage = complete(prompt="one two " * 50, max_tokens=1, cache_salt=salt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0
    assert cached(None) == 0


def test_a_time_limit_ends_it_with_what_there_is(complete):
    [choice] = complete(max_tokens=8000, ignore_eos=True, timeout_s=1)["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 8000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_choice": ["Rome", "Oslo"]}, ("Rome", "Oslo")),
        ({"guided_regex": "[0-9]{3}"}, tuple(map(str, range(1000)))),
        ({"guided_grammar": 'start: "a" "b"+ "."'}, ("ab.", "abb.", "abbb.", "abbbb.")),
        ({"response_format": SEVEN}, ("7",)),
    ],
)
def test_a_shape_is_kept_to(complete, fields, text):
    assert complete(**fields)["choices"][0]["text"].strip() in text


def test_a_template_is_told_what_the_request_says(chat, plain_chat):
    ids = chat()["prompt_token_ids"]
    bare = chat(add_generation_prompt=False)["prompt_token_ids"]
    assert ids[: len(bare)] == bare
    assert len(bare) < len(ids)
    said = [*CHAT["messages"], {"role": "assistant", "content": "The capital of France"}]
    [rest] = chat(messages=said, continue_final_message=True)["choices"]
    assert rest["message"]["content"] == " is Paris."
    [same] = chat(messages=[], prompt_token_ids=ids)["choices"]
    assert same["token_ids"] == plain_chat["token_ids"]


@pytest.mark.parametrize("seed", range(2))
def test_a_chat_with_a_shape_and_tools_has_either(chat, seed):
    parameters = {"type": "object", "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "seven", "parameters": parameters}}
    shaped = {"response_format": SEVEN, "tools": [tool], "temperature": 1.5, "seed": seed}
    [choice] = chat(**shaped, parallel_tool_calls=False, max_tokens=80)["choices"]
    if choice["finish_reason"] == "stop":
        assert choice["message"]["content"] == "7"
    else:
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "seven"
        assert json.loads(call["function"]["arguments"]) == {}
