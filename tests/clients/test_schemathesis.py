"""schemathesis against /openapi.json: whatever fits the document, or does not, is answered as the
document says, and never by a 500.

SCHEMATHESIS_EXAMPLES (`make clients`): how many random requests to each operation, besides those
that schemathesis derives from each field's type and range.
"""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from homing.frontend.openai.structured import StructuredFields
from homing.frontend.openapi import openapi
from tests.support.byte_model import byte_ids
from tests.support.demo_fleet import DemoFleet
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving
from tests.unit.test_frontend_status import SNAPSHOT

pytestmark = pytest.mark.timeout(600)

VOCABULARY = 300
ANSWER_S = 120.0
"""For one request: the document allows 2,048 answers, and schemathesis by itself waits 10 s."""
NUM_EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "0"))


def few(num_examples: int) -> settings:
    return settings(
        max_examples=NUM_EXAMPLES or num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )


def first_names() -> list[str]:
    """The paths, without the other names of an operation: it answers them alike."""
    path_of: dict[str, str] = {}
    for path, operations in openapi()["paths"].items():
        for operation in operations.values():
            path_of.setdefault(operation["summary"], path)
    return list(path_of.values())


DOCUMENT = schemathesis.openapi.from_dict(openapi())
OPERATIONS = DOCUMENT if NUM_EXAMPLES else DOCUMENT.include(path=first_names())
CHATS = DOCUMENT["/v1/chat/completions"]["POST"]
COMPLETIONS = DOCUMENT["/v1/completions"]["POST"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of a frontend over a scripted fleet, in a thread: schemathesis blocks."""
    ready: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        end = asyncio.Event()
        script = says(byte_ids('{"a": "yo"}'))
        async with serving(tmp_path_factory.mktemp("model"), script) as frontend:
            frontend.fleet.snapshot = SNAPSHOT | await DemoFleet().snapshot()
            url = f"http://{frontend.host}:{frontend.port}"
            ready.put((url, asyncio.get_running_loop(), end))
            await end.wait()

    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(asyncio.run, serve())
        url, loop, end = ready.get(timeout=60)
        yield url
        loop.call_soon_threadsafe(end.set)
        served.result(60)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def validate(case, server, session, excluded_checks) -> None:
    case.call_and_validate(
        base_url=server,
        session=session,
        excluded_checks=excluded_checks,
        timeout=ANSWER_S,
    )


@OPERATIONS.parametrize()
# Also for its id: items without parameters have one id, of which pytest-xdist runs one.
@pytest.mark.parametrize("excluded", [[positive_data_acceptance]], ids=["document"])
@few(5)
def test_every_request_is_answered_as_the_document_says(case, server, session, excluded):
    """What does not fit the document is refused, too. That what fits is accepted is for the other
    tests: no document says of two fields that they exclude each other."""
    if {"admin_key": []} in case.operation.definition.raw.get("security", []):
        # Control takes "3" for 3: it may be in the query.
        excluded = [*excluded, negative_data_rejection]
    validate(case, server, session, excluded)


def possible(body: dict[str, Any]) -> dict[str, Any]:
    """A body that fits the document, changed where fields forbid each other and where the model
    sets limits, so that most are answered."""
    shapes = [name for name in StructuredFields.__struct_fields__ if body.get(name) is not None]
    impossible = {*shapes[1:], "model", "min_tokens", "thinking_token_budget", "best_of"}
    impossible |= {"tool_choice", "tools"} if shapes else {"tool_choice"}
    if not body.get("logprobs"):
        impossible.add("top_logprobs")
    kept = {name: _whole(value) for name, value in body.items() if name not in impossible}
    for name in {"n", "max_tokens", "max_completion_tokens"} & kept.keys():
        kept[name] = kept[name] and min(kept[name], 3)
    for name in {"prompt", "prompt_token_ids", "input_ids", "stop_token_ids"} & kept.keys():
        kept[name] = _in_vocabulary(kept[name])
    if "logit_bias" in kept:
        kept["logit_bias"] = {"7": 5.0}
    if "messages" in kept:
        kept["messages"] = kept["messages"] or [{"role": "user", "content": "hi"}]
    return kept


def _whole(value: Any) -> Any:
    """1.0 is an integer in a schema's words, and nobody writes one so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_vocabulary(value: Any) -> Any:
    """Token ids, wherever they are, as ids that the model has."""
    if isinstance(value, list):
        return [_in_vocabulary(entry) for entry in value]
    return int(value) % VOCABULARY if isinstance(value, int | float) else value


@pytest.mark.parametrize("operation", [CHATS, COMPLETIONS], ids=["chats", "completions"])
@few(50)
@given(data=strategies.data())
def test_requests_that_reach_the_model_are_answered_as_the_document_says(
    operation, data, server, session
):
    case = data.draw(operation.as_strategy())
    case.body = possible(case.body)
    excluded = [positive_data_acceptance]
    validate(case, server, session, excluded)
