"""docs/http.md: its examples work, and it names all that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import Struct

from homing.frontend import control
from homing.frontend.metrics import render_metrics
from homing.frontend.native.requests import GenerateBody, TokensBody
from homing.frontend.openai.requests import _NOT_HONOURED, ChatRequest, CompletionRequest
from homing.frontend.openai.tokenize import DetokenizeRequest, TokenizeRequest
from homing.frontend.openapi import documented
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving, strict_json
from tests.unit.test_frontend_status import SNAPSHOT

MANUAL = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
EXAMPLE = re.compile(r"^curl (-X POST )?localhost:5000(/\S*)(?: -d '(.*?)')?$", re.M | re.S)
EXAMPLES = [
    ("POST" if post or body else "GET", path, body or None)
    for block in re.findall(r"```sh\n(.*?)```", MANUAL, re.S)
    for post, path, body in EXAMPLE.findall(block)
]
BODIES: list[type[Struct]] = [
    ChatRequest,
    CompletionRequest,
    GenerateBody,
    TokensBody,
    TokenizeRequest,
    DetokenizeRequest,
    control.PauseBody,
    control.SleepBody,
    control.WakeBody,
    control.UpdateBody,
    control.VersionBody,
    control.AbortBody,
    control.DrainBody,
]


def test_every_example_is_found():
    assert len(EXAMPLES) == len(re.findall(r"^curl ", MANUAL, re.M))


@pytest.mark.parametrize(("method", "path", "body"), EXAMPLES)
async def test_an_example_works(tmp_path, method, path, body):
    async with serving(tmp_path, says(byte_ids("yo")), max_context_tokens=4096) as frontend:
        response = await frontend.http.request(method, path, content=body)
        assert response.status_code == 200, response.text
        if not response.headers["content-type"].startswith("text/event-stream"):
            strict_json(response.text)


async def test_the_error_that_it_shows_is_the_one_that_comes(tmp_path):
    [shown] = re.findall(r"```json\n(.*?)```", MANUAL, re.S)
    async with serving(tmp_path, says(byte_ids("yo"))) as frontend:
        error = await frontend.error("/v1/completions", {"prompt": "x", "n": 0}, 400)
    assert {"error": error} == strict_json(shown)


def test_every_path_is_in_it():
    assert not [path for _, path in documented() if f"`{path}`" not in MANUAL]


@pytest.mark.parametrize("body", BODIES)
def test_every_field_is_in_it(body):
    assert not [name for name in body.__struct_fields__ if f"`{name}`" not in MANUAL]


def test_every_refused_field_is_in_it():
    assert not [name for name in _NOT_HONOURED if f"`{name}`" not in MANUAL]


def test_every_metric_is_in_it():
    exposition = render_metrics(SNAPSHOT).decode()
    names = re.findall(r"^# TYPE homing_(\w+) ", exposition, re.M)
    assert not [name for name in names if not re.search(rf"`{name}(_total)?`", MANUAL)]
