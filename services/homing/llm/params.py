"""SamplingParams of the Python API: what an engine honours, and what is settled on this side."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from homing import params
from homing.errors import InvalidRequest


class SamplingParams(params.SamplingParams, frozen=True, kw_only=True):
    """Parameters of one generation. Bad values raise `InvalidRequest`, a `ValueError`, which names
    field, value and range.

    The fields of `homing.params.SamplingParams`, and those below. Lists are taken for tuples, and
    one string for a list of one stop word.
    """

    num_tokens_total: int | None = None
    """Most tokens of prompt and answer together; excludes `num_tokens_to_generate`."""
    termination_id: int | None = None
    """The token id that ends the answer, in place of the model's own."""
    add_BOS: bool = False
    """Begin a prompt given as text with the model's BOS even if its tokenizer adds none."""
    return_prompt_tokens: bool = False
    """Have the prompt's token ids in the result."""
    detokenize_generations: bool = True
    """Have the answer's text in the result, not its token ids alone."""
    priority: int = 0
    """Lower is sooner: an engine lets such requests run in place of others."""
    streaming_interval: int = 1
    """Tokens of an answer that a delta of `stream` stands for at least, the last one aside."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_words, str):
            msgspec.structs.force_setattr(self, "stop_words", (self.stop_words,))
        for name, kind in _FIELDS.items():
            msgspec.structs.force_setattr(self, name, _checked(name, getattr(self, name), kind))
        params.SamplingParams.__post_init__(self)
        if self.num_tokens_total is not None:
            if self.num_tokens_to_generate is not None:
                raise InvalidRequest(
                    "num_tokens_total and num_tokens_to_generate exclude each other",
                    field="num_tokens_total",
                )
            _at_least("num_tokens_total", self.num_tokens_total, 1)
        if self.termination_id is not None:
            _at_least("termination_id", self.termination_id, 0)
        _at_least("streaming_interval", self.streaming_interval, 1)

    def for_engine(self, num_prompt_tokens: int) -> params.SamplingParams:
        """What is left for an engine to honour, for a prompt of this length. It has a seed."""
        values = {name: getattr(self, name) for name in _ENGINE_FIELDS}
        if self.seed is None:
            values["seed"] = secrets.randbits(63)
        if self.termination_id is not None:
            values["ignore_eos"] = True
            values["stop_token_ids"] = (*self.stop_token_ids, self.termination_id)
        if self.num_tokens_total is not None:
            left = self.num_tokens_total - num_prompt_tokens
            if left < 0:
                raise InvalidRequest(
                    f"the prompt has {num_prompt_tokens} tokens; num_tokens_total is "
                    f"{self.num_tokens_total}",
                    field="num_tokens_total",
                )
            values["num_tokens_to_generate"] = left
        return params.SamplingParams(**values)


def _checked(name: str, value: Any, kind: Any) -> Any:
    """The value as `kind`: msgspec checks types where it decodes, but not where it constructs."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} is {value!r}: {error}", field=name) from None


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidRequest(f"{name} is {value}; it must be at least {least}", field=name)


_FIELDS = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_ENGINE_FIELDS = tuple(field.name for field in msgspec.structs.fields(params.SamplingParams))
