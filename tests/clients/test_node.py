"""openai for Node against a frontend: `node/client.mjs` says what its users expect. Skipped where
Node or the package is missing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from homing.client import Part
from homing.errors import Overloaded, RequestLost
from homing.params import JsonSchema, SamplingParams
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import Script, parts, says
from tests.support.http_frontend import serving

SCRIPT = Path(__file__).parent / "node" / "client.mjs"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="Node is not installed"),
    pytest.mark.skipif(
        not (SCRIPT.parent / "node_modules" / "openai").exists(),
        reason="openai for Node is not here: see `make clients`",
    ),
]

TEMPLATE = (
    "{{ 'Call by <tool_call>: ' ~ (tools | tojson) if tools else '' }}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def is_part_of(part: list[int], ids: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def calls_until_it_knows(prompt: list[int], params: SamplingParams) -> Any:
    """Asks for the weather, and says what it is told."""
    if isinstance(params.structured_output, JsonSchema):
        text = '[{"name":"Trip","arguments":{"city":"Oslo"}}]'
    elif is_part_of(byte_ids("[tool:cold]"), prompt):
        text = "It is cold."
    else:
        text = '<tool_call>{"name": "Trip", "arguments": {"city": "Oslo"}}</tool_call>'
    return parts(prompt, params, byte_ids(text))


def fails_by_seed(prompt: list[int], params: SamplingParams) -> Any:
    ways = [
        [Overloaded("full", retry_after_s=7)],
        [RequestLost("lost")],
        [Part(token_ids=byte_ids("a")), RequestLost("lost")],
    ]
    return ways[params.seed or 0]


def is_full_at_first() -> Script:
    answers = iter([[Overloaded("full", retry_after_s=1)]])

    def script(prompt: list[int], params: SamplingParams) -> Any:
        return next(answers, None) or parts(prompt, params, byte_ids("héllo 😀"))

    return script


@pytest.mark.parametrize(
    ("scenario", "script"),
    [
        ("chat", says(byte_ids("héllo 😀"))),
        ("stream", says(byte_ids("héllo 😀"))),
        ("completions", says(byte_ids("hé"))),
        ("tools", calls_until_it_knows),
        ("errors", fails_by_seed),
        ("retries", is_full_at_first()),
    ],
)
async def test_what_users_of_the_package_expect(tmp_path, scenario, script):
    assert NODE is not None
    async with serving(
        tmp_path, script, chat_template=TEMPLATE, max_context_tokens=4096
    ) as frontend:
        url = f"http://{frontend.host}:{frontend.port}/v1"
        process = await asyncio.create_subprocess_exec(
            NODE,
            str(SCRIPT),
            url,
            scenario,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()
