"""Request bodies: what is read, what is ignored, what is refused and how it is named."""

from __future__ import annotations

import json

import pytest

from homing.errors import InvalidRequest
from homing.frontend.openai.requests import read_chat, read_completion
from homing.frontend.openai.sampling import chat_params, completion_params
from homing.frontend.openai.tools import tool_choice
from homing.params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return completion_params(read_completion(json.dumps({"prompt": "x", **fields}).encode()))


def chat(**fields):
    request = read_chat(json.dumps({"messages": MESSAGES, **fields}).encode())
    return chat_params(request, tool_choice(request), "hermes")


OF_BOTH = pytest.mark.parametrize("params_of", [completion, chat], ids=["completion", "chat"])


def test_a_completion_that_names_no_limit_has_16_tokens_and_a_chat_the_context():
    assert completion() == SamplingParams(num_tokens_to_generate=16)
    assert chat() == SamplingParams()
    assert completion(max_tokens=None) == completion()
    assert chat(max_tokens=None, max_completion_tokens=None) == chat()


@OF_BOTH
def test_names_that_mean_the_same_may_not_differ(params_of):
    assert params_of(request_id="a", rid="a", max_tokens=5) == params_of(max_tokens=5)
    with pytest.raises(InvalidRequest, match="request_id and rid mean the same") as caught:
        params_of(request_id="a", rid="b")
    assert caught.value.field == "rid"


def test_max_completion_tokens_wins_over_max_tokens():
    assert chat(max_tokens=3).num_tokens_to_generate == 3
    assert chat(max_tokens=3, max_completion_tokens=5).num_tokens_to_generate == 5


def test_a_completion_of_no_tokens_scores_its_prompt_and_a_chat_of_none_is_refused():
    params = completion(max_tokens=0, echo=True, logprobs=1)
    assert params.num_tokens_to_generate == 0
    assert params.wants_prompt_log_probs
    for fields in ({"max_completion_tokens": 0}, {"max_completion_tokens": 5, "max_tokens": 0}):
        with pytest.raises(InvalidRequest, match="is 0; it must be at least 1"):
            chat(**fields)


@OF_BOTH
def test_every_field_reaches_the_engine(params_of):
    params = params_of(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"5": -100, "6": 2.5},
        bad_words=["one", " two"],
        allowed_token_ids=[5, 6, 7],
        seed=42,
        stop=["END", "\n"],
        stop_token_ids=[3, 4],
        include_stop_str_in_output=True,
        ignore_eos=True,
    )
    assert params == SamplingParams(
        num_tokens_to_generate=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -100.0, 6: 2.5},
        bad_words=("one", " two"),
        allowed_token_ids=(5, 6, 7),
        seed=42,
        stop_words=("END", "\n"),
        stop_token_ids=(3, 4),
        detokenize_stop_sequence=True,
        ignore_eos=True,
    )


@OF_BOTH
def test_explicit_nulls_are_the_defaults(params_of):
    names = (
        "model stream stream_options n max_tokens min_tokens temperature top_p top_k min_p "
        "repetition_penalty presence_penalty frequency_penalty logit_bias seed stop stop_token_ids "
        "bad_words allowed_token_ids "
        "include_stop_str_in_output ignore_eos prompt_logprobs return_token_ids cache_salt echo "
        "logprobs best_of top_logprobs tools tool_choice response_format suffix user"
    )
    assert params_of(**dict.fromkeys(names.split())) == params_of()


@OF_BOTH
def test_unknown_fields_and_those_that_concern_nobody_here_are_ignored(params_of):
    extra = {"metadata": {}, "store": False, "service_tier": "auto", "user": "u", "foo": 1}
    assert params_of(**extra, safety_identifier="x", parallel_tool_calls=True) == params_of()


def test_truncation_that_clients_write_as_off_is_off():
    assert completion(top_k=-1, top_p=1) == completion(top_p=1.0)
    assert completion(top_k=0) == completion()


def test_top_p_0_means_the_most_probable_token():
    assert completion(top_p=0).greedy


def test_log_probs_of_a_completion_count_alternatives_and_cover_the_prompt_with_echo():
    assert completion(logprobs=3) == SamplingParams(
        num_tokens_to_generate=16, return_log_probs=True, top_n_logprobs=3
    )
    assert not completion(logprobs=0).wants_prompt_log_probs
    assert completion(logprobs=0).return_log_probs
    assert completion(logprobs=0, echo=True).wants_prompt_log_probs
    assert not completion(echo=True).return_log_probs


def test_log_probs_of_a_chat_are_a_switch_and_a_number():
    assert chat(logprobs=True).top_n_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).top_n_logprobs == 5
    assert not chat(logprobs=False).return_log_probs
    assert chat(logprobs=False, top_logprobs=0) == chat()
    with pytest.raises(InvalidRequest) as caught:
        chat(top_logprobs=5)
    assert caught.value.field == "top_logprobs"


@OF_BOTH
def test_prompt_log_probs_are_asked_for_by_number(params_of):
    assert params_of(prompt_logprobs=2).wants_prompt_log_probs
    assert params_of(prompt_logprobs=2).top_n_logprobs == 2


@OF_BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("n", 0),
        ("n", 100_000),
        ("n", "2"),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", [1]),
        ("stream", "yes"),
        ("stream_options", []),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("min_tokens", -1),
        ("cache_salt", 5),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema"}),
        ("guided_whitespace_pattern", " "),
        ("structural_tag", {}),
        ("suffix", "after"),
        ("best_of", 3),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("priority", 2**31),
        ("priority", "x"),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(params_of, field, value):
    with pytest.raises(InvalidRequest) as caught:
        params_of(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)


@OF_BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("suffix", ""),
        ("best_of", 1),
        ("use_beam_search", False),
        ("skip_special_tokens", True),
        ("priority", 0),
        ("modalities", ["text"]),
    ],
)
def test_what_asks_for_nothing_is_accepted(params_of, field, value):
    assert params_of(**{field: value}) == params_of()


@pytest.mark.parametrize("field", [b'"temperature": 1e999', b'"logit_bias": {"1": 1e999}'])
def test_numbers_that_overflow_are_refused(field):
    with pytest.raises(InvalidRequest):
        completion_params(read_completion(b'{"prompt": "x", ' + field + b"}"))


def test_logprobs_of_the_other_endpoints_type_are_refused_by_name():
    for params_of, value in [(completion, True), (completion, 21), (completion, -1), (chat, 1)]:
        with pytest.raises(InvalidRequest) as caught:
            params_of(logprobs=value)
        assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required")],
)
def test_tools_are_for_chats_alone(field, value):
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field: value})
    assert caught.value.field == field


def test_echo_is_for_completions_alone():
    with pytest.raises(InvalidRequest) as caught:
        chat(echo=True)
    assert caught.value.field == "echo"


@pytest.mark.parametrize("read", [read_completion, read_chat])
@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", '"x"', "null", "3", "{}", '{"prompt": "\\ud800"}', "[" * 100_000, b"\xff"],
)
def test_bodies_that_are_no_requests_are_invalid_requests(read, body):
    with pytest.raises(InvalidRequest):
        read(body.encode() if isinstance(body, str) else body)


def test_a_missing_prompt_or_messages_is_named():
    with pytest.raises(InvalidRequest) as caught:
        read_completion(b"{}")
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        read_chat(b'{"messages": null}')
    assert caught.value.field == "messages"
