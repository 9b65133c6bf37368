"""What clients and trainers do over HTTP, on a real fleet of two frontends and the demo model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.backends import demo_files
from tests.support.serving import Serving, serving, wait_until
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(600)

CHAT = "/v1/chat/completions"
TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "plan_trip", "parameters": TRIP}}
HI = [{"role": "user", "content": "Plan a trip, please."}]
# Ends when the test says so and not before.
LONG = {"ignore_eos": True, "max_tokens": 4000}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--frontend-replicas", "2") as running:
        yield running


def post(server: Serving, path: str, body: Any = None) -> dict[str, Any]:
    """By a connection of its own, so that any of the frontends may answer."""
    reply = httpx.post(server.base_url + path, json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def arguments_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    calls = choice["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"plan_trip"}
    return [json.loads(call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "plan_trip"}}, "stop")],
    ids=["required", "named"],
)
def test_required_and_named_calls_fit_their_schema(
    server: Serving, tool_choice: Any, reason: str, temperature: float
) -> None:
    body = {
        "messages": HI,
        "tools": [TOOL],
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 200,
    }
    [choice] = post(server, CHAT, body)["choices"]
    [arguments] = arguments_of(choice)
    jsonschema.validate(arguments, TRIP)
    assert choice["finish_reason"] == reason


def test_totals_are_those_of_the_fleet_from_every_frontend_and_never_fall(server: Serving) -> None:
    ttft, finished = "homing_time_to_first_token_seconds_count", "homing_request_success_total"
    before = server.metric(ttft), server.metric(finished)
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: post(server, "/v1/completions", body), range(12)))
    assert server.metric(finished) - before[1] == 12
    wait_until(lambda: server.metric(ttft) - before[0] == 12, 60, "frontends report")
    scrapes = [server.metrics() for _ in range(10)]
    assert {scrape[ttft] for scrape in scrapes} == {before[0] + 12}
    counters = [key for key in scrapes[0] if re.search(r"_total|_count|_bucket", key)]
    for earlier, later in pairwise(scrapes):
        assert all(later[key] >= earlier[key] for key in counters)
    assert server.metric("homing_request_queue_time_seconds_count") >= 12


@pytest.mark.parametrize("streamed", [False, True])
def test_any_frontend_aborts_a_request_by_its_name(server: Serving, streamed: bool) -> None:
    name = f"long {streamed}"
    body = {"prompt": "Once upon a time", "stream": streamed, **LONG}
    texts: list[str] = []

    def ask() -> None:
        headers = {"X-Request-Id": name}
        url = f"{server.base_url}/v1/completions"
        texts.append(httpx.post(url, json=body, headers=headers, timeout=300).text)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.metric("homing_num_requests_running") > 0, 60, "it runs")
    assert post(server, "/abort", {"request_id": "long"}) == {"aborted": 0}
    assert post(server, "/abort", {"request_id": name}) == {"aborted": 1}
    asking.join(60)
    assert '"finish_reason":"abort"' in texts[0]


def test_a_paused_fleet_keeps_requests_until_it_is_resumed(server: Serving) -> None:
    assert post(server, "/pause", {"mode": "keep"})["status"] == "paused"
    assert post(server, "/pause", {"mode": "keep"})["status"] == "paused"
    wait_until(
        lambda: all(
            httpx.get(f"{server.base_url}/is_paused").json()["is_paused"] for _ in range(4)
        ),
        10,
        "every frontend knows",
    )
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(post, server, "/generate", {"text": "x", "sampling_params": {"n": 2}})
        wait_until(lambda: server.metric("homing_num_requests_waiting") == 2, 60, "both wait")
        assert not asking.done()
        assert post(server, "/resume/")["status"] == "running"
        answers: Any = asking.result(120)
    assert len(answers) == 2


def test_turns_go_on_from_exact_tokens(server: Serving) -> None:
    body = {"messages": HI, "return_token_ids": True, "logprobs": True, "max_tokens": 12}
    message = post(server, CHAT, body)["choices"][0]["message"]
    turns = [*HI, message, {"role": "user", "content": "Go on."}]
    second = post(server, CHAT, {**body, "messages": turns})["choices"][0]["message"]
    exact = [*message["prompt_token_ids"], *message["generation_token_ids"]]
    assert second["prompt_token_ids"][: len(exact)] == exact
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"])


def test_deep_health_generates(server: Serving) -> None:
    reply = httpx.get(f"{server.base_url}/health_generate", timeout=60)
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")


def test_a_prefix_cache_that_was_reset_is_empty(server: Serving) -> None:
    body = {"prompt": "word " * 64, "max_tokens": 1}
    post(server, "/v1/completions", body)
    cached = post(server, "/v1/completions", body)["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] > 0
    assert post(server, "/reset_prefix_cache/")["dropped_blocks"] > 0
    cached = post(server, "/v1/completions", body)["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] == 0


def test_new_weights_serve_under_a_new_version_and_old_prefixes_are_gone(server: Serving) -> None:
    body = {"prompt": "word " * 64, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    post(server, "/v1/completions", body)
    before = post(server, "/v1/completions", body)
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    directory = str(demo_files().directory)
    version = post(server, "/update_weights", {"path": directory})["weight_version"]
    assert version == before["weight_version"] + 1
    after = post(server, "/v1/completions", body)
    assert after["weight_version"] == version
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"][0]["text"] == before["choices"][0]["text"]  # they are the same weights


def test_a_fleet_sleeps_and_wakes(server: Serving) -> None:
    body = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    before = post(server, "/v1/completions", body)["choices"][0]["text"]
    assert post(server, "/sleep?level=1")["status"] == "suspended"
    assert post(server, "/sleep?level=1")["status"] == "suspended"
    assert post(server, "/wake_up")["status"] == "running"
    assert post(server, "/v1/completions", body)["choices"][0]["text"] == before


def test_a_fleet_with_keys_starts_and_asks_for_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    environment = {"HOMING_ADMIN_API_KEY": "root"}
    model = str(make_tiny_model("llama", tmp_path / "tiny"))
    arguments = [model, "--frontend-replicas", "1", "--api-key-file", str(keys)]
    with serving(*arguments, environment=environment) as server:
        models = f"{server.base_url}/v1/models"
        assert httpx.get(models).status_code == 401
        assert httpx.get(models, headers={"Authorization": "Bearer one"}).status_code == 200
        paused = f"{server.base_url}/is_paused"
        assert httpx.get(paused, headers={"Authorization": "Bearer one"}).status_code == 401
        assert httpx.get(paused, headers={"Authorization": "Bearer root"}).status_code == 200
