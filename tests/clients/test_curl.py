"""curl against a frontend, as people type it and scripts have it; skipped without curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any, NamedTuple

import pytest

from homing.client import Part
from homing.errors import Overloaded
from homing.wire import Finish, FinishReason
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import Frontend, serving, sse_data, strict_json, until

CURL = shutil.which("curl")

pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")

HI = '{"messages": [{"role": "user", "content": "hi"}]}'


class Reply(NamedTuple):
    status: int
    content_type: str
    text: str

    @property
    def body(self) -> Any:
        return strict_json(self.text)


async def start(frontend: Frontend, path: str, *arguments: str) -> asyncio.subprocess.Process:
    assert CURL is not None
    url = f"http://{frontend.host}:{frontend.port}{path}"
    return await asyncio.create_subprocess_exec(
        CURL, "--silent", "--show-error", *arguments, url, stdout=asyncio.subprocess.PIPE
    )


async def curl(frontend: Frontend, path: str, *arguments: str) -> Reply:
    """What `curl ARGUMENTS URL` gets."""
    written = ["--write-out", r"\n%{http_code} %{content_type}"]
    process = await start(frontend, path, *written, *arguments)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    text, _, last = output.decode().rpartition("\n")
    status, _, content_type = last.partition(" ")
    return Reply(int(status), content_type, text)


@pytest.mark.parametrize("slash", ["", "/"])
async def test_a_chat_and_a_completion_whatever_the_content_type(tmp_path, slash):
    async with serving(tmp_path, says(byte_ids("héllo 😀"))) as frontend:
        # -d sends application/x-www-form-urlencoded.
        chat = await curl(frontend, f"/v1/chat/completions{slash}", "-d", HI)
        json_type = ["-H", "Content-Type: application/json"]
        completion = await curl(
            frontend, f"/v1/completions{slash}", *json_type, "-d", '{"prompt": "hi", "echo": true}'
        )
        models = await curl(frontend, f"/v1/models{slash}")
        health = await curl(frontend, f"/health{slash}", "--head")
    assert (chat.status, chat.content_type) == (200, "application/json")
    assert chat.body["choices"][0]["message"]["content"] == "héllo 😀"
    assert completion.body["choices"][0]["text"] == "hihéllo 😀"
    assert models.body["data"][0]["id"] == "fake"
    assert health.status == 200


async def test_a_body_from_a_file_and_with_expect_100_continue(tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "x" * 100_000, "max_tokens": 1}))
    async with serving(
        tmp_path / "model", says(byte_ids("yo")), max_context_tokens=200_000
    ) as frontend:
        reply = await curl(
            frontend, "/v1/completions", "-H", "Expect: 100-continue", "-d", f"@{body}"
        )
    assert reply.body["usage"]["prompt_tokens"] == 100_000


async def test_a_stream_comes_while_it_is_made_and_ends_in_done(tmp_path):
    last_word = asyncio.Event()
    end = Part(token_ids=byte_ids(" you"), finish=Finish(FinishReason.STOP))
    steps = [Part(token_ids=byte_ids("hey")), last_word, end]
    asked = HI[:-1] + ', "stream": true}'
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        process = await start(frontend, "/v1/chat/completions", "-N", "-d", asked)
        assert process.stdout is not None
        early = b""
        while b"hey" not in early:
            early += await asyncio.wait_for(process.stdout.read(4096), 60)
        last_word.set()
        late = await asyncio.wait_for(process.stdout.read(), 60)
        assert await process.wait() == 0
    *events, done = sse_data((early + late).decode())
    assert done == "[DONE]"
    deltas = [strict_json(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "hey you"


async def test_a_stream_that_is_cut_off_ends_its_generation(tmp_path):
    steps = [Part(token_ids=byte_ids("hey")), asyncio.Event()]
    asked = HI[:-1] + ', "stream": true}'
    async with serving(tmp_path, lambda prompt, params: steps) as frontend:
        process = await start(frontend, "/v1/chat/completions", "-N", "-d", asked)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(1), 60)
        process.terminate()
        await process.wait()
        await until(lambda: not frontend.fleet.running)


async def test_errors_are_json_with_their_status(tmp_path):
    full = [Overloaded("full", retry_after_s=7)]
    async with serving(tmp_path, lambda prompt, params: full) as frontend:
        replies = {
            name: await curl(frontend, *arguments)
            for name, arguments in {
                "no such path": ("/v1/embeddings", "-d", HI),
                "no such model": ("/v1/models/nobody",),
                "no JSON": ("/v1/chat/completions", "-d", "hello"),
                "no messages": ("/v1/chat/completions", "-d", "{}"),
                "no such method": ("/v1/chat/completions",),
                "too much": ("/v1/chat/completions", "-d", HI),
            }.items()
        }
        head = await curl(frontend, "/v1/chat/completions", "-i", "-d", HI)
    statuses = {name: reply.status for name, reply in replies.items()}
    assert statuses == {
        "no such path": 404,
        "no such model": 404,
        "no JSON": 400,
        "no messages": 400,
        "no such method": 405,
        "too much": 429,
    }
    for reply in replies.values():
        assert reply.content_type == "application/json"
        assert reply.body["error"]["message"]
    assert replies["no messages"].body["error"]["param"] == "messages"
    assert "retry-after: 7" in head.text.lower()


async def test_fail_tells_a_script_of_an_error(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        process = await start(frontend, "/v1/models/nobody", "--fail-with-body")
        output, _ = await process.communicate()
    assert process.returncode == 22
    assert strict_json(output.decode())["error"]["code"] == "model_not_found"
