"""The OpenAPI document describes the routes that there are, and replies fit it."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from homing.frontend.app import create_app
from homing.frontend.openapi import documented
from homing.frontend.service import Service
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import FakeClient, says
from tests.support.http_frontend import serving, sse_data, strict_json
from tests.unit.test_frontend_status import SNAPSHOT

CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "return_token_ids": True,
    "return_weight_versions": True,
}
COMPLETION = {"prompt": ["a", "b"], "logprobs": 1, "echo": True, "return_token_ids": True}
TOOLS = {
    "messages": CHAT["messages"],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
EXAMPLES: list[tuple[str, str, Any]] = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", TOOLS),
    ("post", "/v1/chat/completions", CHAT | {"n": 1, "prompt_logprobs": 1}),
    ("post", "/v1/completions", COMPLETION),
    ("post", "/v1/completions", {"prompt": [5, 6], "prompt_logprobs": 1}),
    ("post", "/generate", {"text": "hi", **SCORES}),
    ("post", "/generate", {"text": ["hi", "you"], "return_weight_versions": True}),
    ("post", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 1}}),
    ("post", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [104]}),
    ("get", "/v1/models", None),
    ("get", "/health", None),
    ("get", "/health_generate", None),
    ("get", "/liveness", None),
    ("get", "/version", None),
    ("get", "/server_info", None),
    ("get", "/load", None),
    ("get", "/openapi.json", None),
    ("post", "/pause", {"mode": "keep"}),
    ("post", "/resume", None),
    ("post", "/sleep", {"level": 1}),
    ("post", "/wake_up", None),
    ("post", "/update_weights", {"path": "/w"}),
    ("post", "/update_weight_version", {"weight_version": 3}),
    ("post", "/abort", {"abort_all": True}),
    ("post", "/reset_prefix_cache", None),
    ("post", "/drain", {"rank": 1}),
    ("get", "/is_paused", None),
    ("get", "/is_sleeping", None),
    ("get", "/weight_version", None),
]


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def test_every_route_is_documented_and_nothing_else():
    app = create_app(Service(FakeClient("", says([]))))  # type: ignore[arg-type]
    routes = {
        (method.lower(), re.sub(r"<path:(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if not rule.rule.startswith(("/page/", "/static/"))
    }
    assert set(documented()) == routes


@pytest.mark.parametrize(("method", "path", "body"), EXAMPLES)
async def test_requests_and_replies_fit_the_document(tmp_path, method, path, body):
    async with serving(tmp_path, says(byte_ids("yo")), max_context_tokens=2048) as frontend:
        frontend.fleet.snapshot = SNAPSHOT
        document = (await frontend.http.get("/openapi.json")).json()
        operation = document["paths"][path][method]
        if body is not None:
            content = operation["requestBody"]["content"]["application/json"]
            validate(document, content["schema"], body)
        response = await frontend.http.request(method, path, json=body)
        assert response.status_code == 200, response.text
        content = operation["responses"]["200"]["content"]
        validate(document, content["application/json"]["schema"], strict_json(response.text))
        if "text/event-stream" in content:
            response = await frontend.http.post(path, json=(body or {}) | {"stream": True})
            assert response.status_code == 200, response.text
            data = content["text/event-stream"]["itemSchema"]["properties"]["data"]
            done, event = data["anyOf"]
            *events, last = sse_data(response.text)
            assert last == done["const"]
            for text in events:
                validate(document, event["contentSchema"], strict_json(text))


@pytest.mark.parametrize(
    ("method", "path", "body"), [(m, p, b) for m, p, b in EXAMPLES if m == "post" and b]
)
async def test_an_error_fits_the_document(tmp_path, method, path, body):
    wrong = {name: object for name, object in body.items()} | {next(iter(body)): 5.5}
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        document = (await frontend.http.get("/openapi.json")).json()
        response = await frontend.http.request(method, path, json=wrong)
        assert response.status_code == 400, response.text
        default = document["paths"][path][method]["responses"]["default"]["content"]
        validate(document, default["application/json"]["schema"], response.json())


async def test_the_document_needs_no_key_and_names_what_needs_which(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        document = (await frontend.http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert {"admin_key": []} in document["paths"]["/pause"]["post"]["security"]
    ids = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(ids) == len(set(ids))
