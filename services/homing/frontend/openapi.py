"""The OpenAPI document, made from the structs that bodies are read into and replies are.

One table says which route has which; a test compares it with the routes that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from homing.frontend import control, status
from homing.frontend.native.reply import Generated, Tokens
from homing.frontend.native.requests import GenerateBody, TokensBody
from homing.frontend.openai.requests import ChatRequest, CompletionRequest
from homing.frontend.openai.schemas import ChatChunk, ChatCompletion, Completion
from homing.frontend.openai.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from homing.frontend.openapi_limits import add_limits


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class Error(Struct):
    error: ErrorDetail


class Operation(NamedTuple):
    method: str
    paths: tuple[str, ...]
    """The first is ours; the others are what other servers call it."""
    summary: str
    reply: Any
    """Type of the JSON reply; None: the reply is not JSON."""
    body: type[Struct] | None = None
    body_required: bool = True
    event: type[Struct] | None = None
    """Of the stream that `stream: true` asks for."""
    control: bool = False
    """Needs the admin key."""


def _control(
    paths: str, summary: str, reply: Any = control.FleetStatus, body: type[Struct] | None = None
) -> Operation:
    return Operation(
        "post", tuple(paths.split()), summary, reply, body, body_required=False, control=True
    )


_OPERATIONS = [
    Operation(
        "post",
        ("/v1/chat/completions", "/chat/completions"),
        "Answer a chat",
        ChatCompletion,
        ChatRequest,
        event=ChatChunk,
    ),
    Operation(
        "post",
        ("/v1/completions", "/completions"),
        "Continue or score prompts",
        Completion,
        CompletionRequest,
        event=Completion,
    ),
    Operation("get", ("/v1/models", "/models"), "The models served", status.ModelList),
    Operation("get", ("/v1/models/{name}", "/models/{name}"), "One of them", status.ModelEntry),
    Operation(
        "post",
        ("/generate",),
        "Token-in, token-out, as SGLang has it",
        Generated | list[Generated],
        GenerateBody,
        event=Generated,
    ),
    Operation(
        "post",
        ("/inference/v1/generate",),
        "Token-in, token-out, as vLLM has it",
        Tokens,
        TokensBody,
        event=Tokens,
    ),
    Operation(
        "post", ("/tokenize", "/v1/tokenize"), "Text or chat to ids", Tokenized, TokenizeRequest
    ),
    Operation(
        "post", ("/detokenize", "/v1/detokenize"), "Ids to text", Detokenized, DetokenizeRequest
    ),
    Operation("get", ("/health", "/ready", "/ping"), "Whether some rank serves", status.Health),
    Operation("get", ("/health_generate",), "The same, by generating a token", status.Health),
    Operation("get", ("/liveness",), "Whether this process answers", status.Version),
    Operation("get", ("/version",), "Version of the server", status.Version),
    Operation("get", ("/server_info",), "What is served and how", status.ServerInfo),
    Operation("get", ("/load",), "How busy the ranks are", status.Load),
    Operation("get", ("/metrics",), "Totals of the fleet, for Prometheus", None),
    Operation("get", ("/openapi.json",), "This document", dict[str, Any]),
    Operation("get", ("/fleet",), "What the page shows", dict[str, Any]),
    Operation("get", ("/",), "A page for people", None),
    _control("/pause", "Stop generating", body=control.PauseBody),
    _control("/pause_generation", "The same; its default mode is abort", body=control.PauseBody),
    _control("/resume /continue_generation", "Go on generating"),
    _control("/sleep /release_memory_occupation", "Give memory back", body=control.SleepBody),
    _control("/wake_up /resume_memory_occupation", "Take it again", body=control.WakeBody),
    _control(
        "/update_weights /update_weights_from_disk", "Take new weights", body=control.UpdateBody
    ),
    _control(
        "/update_weight_version", "Count the weights as of a version", body=control.VersionBody
    ),
    _control(
        "/abort /abort_request /abort_requests",
        "End requests with what they have",
        control.Aborted,
        control.AbortBody,
    ),
    _control("/drain", "Let a rank finish, and go", control.Drained, control.DrainBody),
    _control("/reset_prefix_cache /flush_cache", "Forget all prefixes", control.Dropped),
    Operation("get", ("/is_paused",), "Whether it is paused", control.Paused, control=True),
    Operation("get", ("/is_sleeping",), "Whether it sleeps", control.Sleeping, control=True),
    Operation("get", ("/weight_version",), "Of the fleet", control.WeightVersion, control=True),
]


@cache
def openapi() -> dict[str, Any]:
    """The document, version 3.1."""
    types = [t for o in _OPERATIONS for t in (o.body, o.event, o.reply) if t is not None]
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components([*types, Error], ref_template=template)
    schema_of = {id(kind): schema for kind, schema in zip([*types, Error], schemas, strict=True)}
    add_limits(components)
    for body in {o.body for o in _OPERATIONS if o.control and o.body}:
        _let_null_be_the_default(components[body.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        for path in operation.paths:
            paths.setdefault(path, {})[operation.method] = _operation(path, operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Homing", "version": version("homing")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer"},
                "admin_key": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{}, {"api_key": []}],
    }


def _let_null_be_the_default(schema: dict[str, Any]) -> None:
    for name in schema["properties"].keys() - schema.get("required", []):
        value = schema["properties"][name]
        default = {"default": value.pop("default")} if "default" in value else {}
        schema["properties"][name] = {"anyOf": [value, {"type": "null"}], **default}


def _operation(path: str, operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{path.strip('/').replace('/', '_') or 'page'}",
        "responses": {
            "200": {"description": "OK", "content": _content(operation, schema_of)},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": schema_of[id(Error)]}},
            },
        },
    }
    if operation.reply is status.Health:
        described["responses"]["503"] = described["responses"]["200"] | {"description": "Not so"}
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": schema_of[id(operation.body)]}},
        }
    if operation.control:
        described["security"] = [{}, {"admin_key": []}]
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    return described


def _content(operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    if operation.reply is None:
        kind = "text/html" if operation.paths == ("/",) else "text/plain"
        return {kind: {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": schema_of[id(operation.reply)]}}
    if operation.event is not None:
        events = [schema_of[id(operation.event)], schema_of[id(Error)]]
        content["text/event-stream"] = {"itemSchema": _event({"anyOf": events})}
    return content


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """A server-sent event as OpenAPI 3.2 describes one; tools know it in 3.1, too."""
    json = {"contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, json]}},
    }


def documented() -> Sequence[tuple[str, str]]:
    """(method, path) of every operation."""
    return [(o.method, path) for o in _OPERATIONS for path in o.paths]
