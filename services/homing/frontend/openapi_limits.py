"""What the types of a request's fields do not say: their ranges, for the OpenAPI document.

The readers enforce them, in their own words. schemathesis sees to it that they and this agree.
"""

from __future__ import annotations

from typing import Any

from homing.client.checks import MAX_CACHE_SALT_CHARACTERS
from homing.frontend.openai.sampling import MAX_CHOICES, MAX_REQUEST_ID_CHARACTERS
from homing.frontend.token_routes import MAX_CHARACTERS
from homing.params.sampling import (
    MAX_BAD_WORDS,
    MAX_SEED,
    MAX_STOP_WORDS,
    MAX_TOP_LOGPROBS,
)

_FRACTION = {"minimum": 0, "maximum": 1}
_PENALTY = {"minimum": -2, "maximum": 2}
_NUM_TOP = {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}
_NAME = {"maxLength": MAX_REQUEST_ID_CHARACTERS}
_SALT = {"maxLength": MAX_CACHE_SALT_CHARACTERS}
_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "minItems": 1, "items": _ID}
_TEXTS = {"type": "array", "minItems": 1, "items": {"type": "string"}}
_BATCH = {"type": "array", "minItems": 1, "items": _IDS}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        }
    },
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART}]
        },
        "tool_calls": {
            "anyOf": [{"type": "null"}, {"type": "array", "items": _CALL}],
        },
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
        },
    },
}

# Field -> keywords beside those of its type. A number's do nothing to a null.
_OF_GENERATIONS: dict[str, dict[str, Any]] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0},
    "top_p": _FRACTION,
    "top_k": {"minimum": -1},
    "min_p": _FRACTION,
    "repetition_penalty": {"minimum": 0.001, "maximum": 1000},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": {
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "seed": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
    "stop": {"minLength": 1, "maxItems": MAX_STOP_WORDS, "items": {"minLength": 1}},
    "stop_token_ids": {"items": _ID},
    "bad_words": {"maxItems": MAX_BAD_WORDS, "items": {"minLength": 1}},
    "allowed_token_ids": {"minItems": 1, "items": _ID},
    "prompt_logprobs": _NUM_TOP,
    "cache_salt": _SALT,
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "timeout_s": {"exclusiveMinimum": 0},
    "request_id": _NAME,
    "rid": _NAME,
}
_OF_BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "CompletionRequest": {
        **_OF_GENERATIONS,
        "prompt": {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _BATCH]},
        "logprobs": _NUM_TOP,
    },
    "ChatRequest": {
        **_OF_GENERATIONS,
        "messages": {"items": _MESSAGE},
        "max_tokens": {"minimum": 1},
        "max_completion_tokens": {"minimum": 1},
        "top_logprobs": _NUM_TOP,
        "tools": {"items": _TOOL},
        "thinking_token_budget": {"minimum": 1},
    },
    "GenerateBody": {
        "input_ids": {"anyOf": [_IDS, _BATCH, {"type": "null"}]},
        "top_logprobs_num": _NUM_TOP,
        "cache_salt": _SALT,
        "extra_key": _SALT,
        "rid": _NAME,
    },
    "TokensBody": {
        "token_ids": _IDS,
        "cache_salt": _SALT,
        "request_id": _NAME,
        "priority": _OF_GENERATIONS["priority"],
    },
    "TokenizeRequest": {"prompt": {"maxLength": MAX_CHARACTERS}, "messages": {"items": _MESSAGE}},
    "DetokenizeRequest": {"tokens": {"items": _ID}},
    "ResponseFormat": {"type": {"enum": ["text", "json_object", "json_schema"]}},
}


def add_limits(components: dict[str, Any]) -> None:
    """Write them into the schemas that msgspec makes of the structs."""
    for body, limits in _OF_BODIES.items():
        for field, keywords in limits.items():
            components[body]["properties"][field].update(keywords)
