"""SamplingParams: what may be asked for."""

from __future__ import annotations

import msgspec
import pytest

from homing.errors import InvalidRequest
from homing.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("min_tokens", -1),
        ("num_tokens_to_generate", -1),
        ("seed", 2**63),
        ("stop_words", ("",)),
        ("stop_words", ("x",) * 17),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * 129),
        ("allowed_token_ids", ()),
        ("logit_bias", {5: float("inf")}),
        ("logit_bias", {5: 101.0}),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_fields_that_exclude_each_other_are_refused():
    with pytest.raises(InvalidRequest, match="return_log_probs"):
        SamplingParams(top_n_logprobs=2)
    with pytest.raises(InvalidRequest, match="from 0 to 3"):
        SamplingParams(min_tokens=4, num_tokens_to_generate=3)


def test_bytes_hold_only_what_differs_from_the_defaults():
    assert msgspec.msgpack.decode(SamplingParams().to_bytes()) == {}
    params = SamplingParams(temperature=0.5, seed=-3, logit_bias={7: -1.0}, stop_words=("a",))
    assert SamplingParams.from_bytes(params.to_bytes()) == params


@pytest.mark.parametrize(
    "data", [b"", b"\x90", b"\xc1", b"\x81\xa3foo\x01", b"\x81\xa5top_k\xff", b"\x81\xa5top_p\x09"]
)
def test_bytes_that_are_no_parameters_are_refused(data):
    with pytest.raises(InvalidRequest):
        SamplingParams.from_bytes(data)


def test_token_ids_past_the_vocabulary_are_refused_with_the_limit():
    SamplingParams(stop_token_ids=(99,), logit_bias={0: 1.0}).check_vocabulary(100)
    with pytest.raises(InvalidRequest, match="from 0 to 99") as caught:
        SamplingParams(logit_bias={100: 1.0}).check_vocabulary(100)
    assert caught.value.field == "logit_bias"
