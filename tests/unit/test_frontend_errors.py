"""What clients are told when something is wrong, over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from homing.client import Part
from homing.errors import (
    HomingError,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestLost,
    Unavailable,
)
from homing.frontend import connection, stream
from homing.frontend.http_errors import status_of
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving, sse_data, strict_json

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
FAILURES = [
    (InvalidRequest("no", field="seed"), 400),
    (Overloaded("full", retry_after_s=2.2), 429),
    (Unavailable("gone"), 503),
    (RequestLost("lost thrice"), 503),
    (InternalError("bug"), 500),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "null", b"\xff\xfe"])
async def test_bodies_that_are_no_json_objects_are_400(tmp_path, path, body):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        error = await frontend.error(path, body, 400)
        assert error["type"] == "invalid_request_error"
        await frontend.post(path, HELLO)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("failure", "status"), FAILURES, ids=lambda value: type(value).__name__)
async def test_an_error_before_the_first_token_has_its_status(
    tmp_path, path, streamed, failure, status
):
    async with serving(tmp_path, lambda prompt, params: [failure]) as frontend:
        body = {**HELLO, "stream": streamed}
        error = await frontend.error(path, body, status)
        assert error["message"] == str(failure)
        response = await frontend.http.post(path, json=body)
        retry = {429: "3", 503: "1"}.get(status)
        assert response.headers.get("Retry-After") == retry


async def test_an_error_in_the_middle_of_a_whole_answer_has_its_status(tmp_path):
    steps = [Part(token_ids=byte_ids("a")), RequestLost("lost thrice")]
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        await frontend.error(CHAT, HELLO, 503)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(tmp_path, path):
    steps = [Part(token_ids=byte_ids("a")), RequestLost("lost thrice")]
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        response = await frontend.http.post(path, json={**HELLO, "stream": True})
    assert response.status_code == 200
    *chunks, last = map(strict_json, sse_data(response.text))
    assert all("error" not in chunk for chunk in chunks)
    assert last["error"]["message"] == "lost thrice"
    assert last["error"]["code"] == "unavailable"


async def test_a_bug_in_the_middle_of_a_stream_is_told_too(tmp_path, monkeypatch, caplog):
    def broken(self, *arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(stream.Choices, "push", broken)
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        response = await frontend.http.post(COMPLETIONS, json={**HELLO, "stream": True})
    [event] = sse_data(response.text)
    assert strict_json(event)["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text


async def test_a_bug_is_500_with_nothing_of_its_text(tmp_path, monkeypatch, caplog):
    def broken(self, *arguments):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(stream.Choices, "push", broken)
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        error = await frontend.error(COMPLETIONS, HELLO, 500)
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


async def test_one_choice_that_fails_ends_the_others(tmp_path):
    never = asyncio.Event()

    def second_fails(prompt, params):
        return [Unavailable("gone")] if params.seed == 1 else [never]

    async with serving(tmp_path, second_fails) as frontend:
        await frontend.error(CHAT, {**HELLO, "n": 2, "seed": 0}, 503)
        assert frontend.fleet.submitted[0].cancelled.is_set()
        assert frontend.fleet.running == []


async def test_beyond_the_limit_of_unfinished_requests_clients_are_told_to_wait(tmp_path):
    never = asyncio.Event()
    async with serving(tmp_path, lambda p, s: [never], max_inflight=3) as frontend:
        error = await frontend.error(COMPLETIONS, {**HELLO, "n": 4}, 429)
        assert error["code"] == "overloaded"
        assert frontend.fleet.running == []  # the three that were started have ended again


async def test_without_engines_requests_are_503(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        object.__setattr__(frontend.fleet.fleet, "live_ranks", 0)
        response = await frontend.http.post(CHAT, json=HELLO)
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "3"


@pytest.mark.parametrize("model", [None, "", "EMPTY", "fake"])
async def test_the_real_name_is_echoed(tmp_path, model):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.post(CHAT, {**HELLO, "model": model}))["model"] == "fake"


async def test_an_unknown_model_is_404(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        for path in (CHAT, COMPLETIONS):
            error = await frontend.error(path, {**HELLO, "model": "gpt-4"}, 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_given_names_replace_the_models_own(tmp_path):
    async with serving(tmp_path, says(byte_ids("x")), names=("a/b", "c")) as frontend:
        assert (await frontend.post(CHAT, {**HELLO, "model": "c"}))["model"] == "c"
        assert (await frontend.post(CHAT, HELLO))["model"] == "a/b"
        await frontend.error(CHAT, {**HELLO, "model": "fake"}, 404)
        assert (await frontend.http.get("/v1/models/a/b/")).json()["id"] == "a/b"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_other_paths_and_methods_are_refused_as_json(tmp_path, method, path, status):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        url = f"http://{frontend.host}:{frontend.port}{path}"
        response = await frontend.http.request(method, url)
        assert response.status_code == status
        assert set(strict_json(response.text)["error"]) == {"message", "type", "param", "code"}
        assert response.headers["X-Request-Id"]
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_gets_a_413_that_its_sender_can_read(
    tmp_path, monkeypatch, chunked
):
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 1_000_000)
    body = json.dumps({"prompt": "x" * 8_000_000}).encode()

    async def pieces():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        content = pieces() if chunked else body
        headers = {"X-Request-Id": "mine"}
        response = await frontend.http.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 413
        assert "1000000 bytes" in strict_json(response.text)["error"]["message"]
        assert response.headers["X-Request-Id"] == "mine"
        fits = {"prompt": "x", "user": "u" * 900_000}
        await frontend.post(COMPLETIONS, fits)


async def test_the_limit_is_32_mib(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.http.post(COMPLETIONS, content=b" " * 40_000_000)).status_code == 413
        await frontend.post(COMPLETIONS, {"prompt": "x", "user": "u" * 30_000_000})


async def test_request_ids_come_back_and_odd_ones_are_replaced(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:

        async def returned(request_id):
            headers = {"X-Request-Id": request_id}
            response = await frontend.http.post(CHAT, json=HELLO, headers=headers)
            return response.headers["X-Request-Id"]

        assert await returned("abc-1") == "abc-1"
        assert await returned("x" * 257) != "x" * 257
        assert await returned("") != ""
        same = await asyncio.gather(returned("twin"), returned("twin"))
        assert same == ["twin", "twin"]


def test_every_error_that_we_raise_has_a_status():
    def leaves(kind):
        return [leaf for sub in kind.__subclasses__() for leaf in (sub, *leaves(sub))]

    for kind in leaves(HomingError):
        assert 400 <= status_of(kind("x")) < 600
