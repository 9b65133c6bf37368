"""/health, /v1/models, /version and /metrics."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from homing.wire import FleetState, RankInfo
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving

SNAPSHOT = {
    "live_ranks": 1,
    "ranks": [
        {
            "rank": 0,
            "live": True,
            "load": 5,
            "dispatched": 41,
            "running": 4,
            "waiting": 1,
            "owed_tokens": 99,
            "kv_used_blocks": 25,
            "kv_total_blocks": 100,
        },
        {
            "rank": 1,
            "live": False,
            "load": 0,
            "dispatched": 1,
            "running": 0,
            "waiting": 0,
            "owed_tokens": 0,
            "kv_used_blocks": 0,
            "kv_total_blocks": 0,
        },
    ],
    "totals": {"prompt_tokens": 1000, "cached_tokens": 600, "generated_tokens": 70},
    "submitted": 42,
    "resubmissions": 2,
    "lost_requests": 2,
    "lost_ranks": 1,
    "garbage": 3,
    "finished": {"stop": 30, "length": 10},
    "refused": {"no_rank": 1},
}


async def test_health_is_ok_while_a_rank_serves_and_names_those_lost(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        lost = RankInfo(1, FleetState.RUNNING, live=False)
        fleet = frontend.fleet.fleet
        frontend.fleet.fleet = replace(fleet, ranks=[*fleet.ranks, lost])
        response = await frontend.http.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "pid": os.getpid(),
        "model": "fake",
        "state": "running",
        "live_ranks": 1,
        "ranks": [
            {"rank": 0, "live": True, "state": "running"},
            {"rank": 1, "live": False, "state": "running"},
        ],
        "lost_ranks": [1],
    }


async def test_health_is_503_without_a_rank_and_without_a_coordinator(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        whole = frontend.fleet.fleet
        frontend.fleet.fleet = replace(whole, live_ranks=0)
        response = await frontend.http.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == "no engine is serving"
        frontend.fleet.fleet = replace(whole, connected=False)
        response = await frontend.http.get("/health/")
        assert response.status_code == 503
        assert response.json()["status"] == "the coordinator does not answer"


async def test_before_the_model_is_known_requests_are_503_and_then_served(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(tmp_path, says(byte_ids("x")), wait=False, knows_model=False) as frontend:
        assert (await frontend.http.get("/health")).status_code == 503
        assert (await frontend.http.get("/v1/models")).status_code == 503
        await frontend.error("/v1/chat/completions", chat, 503)
        frontend.fleet.first_engine_joins()
        async with asyncio.timeout(30):
            while (await frontend.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        await frontend.post("/v1/chat/completions", chat)


async def test_a_request_at_a_frontend_that_just_came_back_waits_until_it_has_joined(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(tmp_path, says(byte_ids("x")), wait=False, joins=False) as frontend:
        early = asyncio.create_task(frontend.post("/v1/chat/completions", chat))
        assert (await frontend.http.get("/liveness")).status_code == 200
        assert not early.done()
        frontend.fleet.joined.set()
        assert (await early)["choices"][0]["message"]["content"] == "x"


async def test_models_are_listed_with_their_context_length(tmp_path):
    async with serving(tmp_path, says(byte_ids("x")), names=("a", "b")) as frontend:
        listed = (await frontend.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [entry["id"] for entry in listed["data"]] == ["a", "b"]
        entry = listed["data"][0]
        assert (entry["object"], entry["root"], entry["max_model_len"]) == ("model", "fake", 256)
        assert (await frontend.http.get("/v1/models/a")).json() == entry
        assert (await frontend.http.get("/v1/models/nobody")).status_code == 404


async def test_the_version_is_told(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.http.get("/version")).json().keys() == {"version"}


async def test_the_server_tells_what_it_serves_and_how(tmp_path):
    async with serving(tmp_path, says(byte_ids("x")), names=("a", "b")) as frontend:
        info = (await frontend.http.get("/server_info")).json()
    assert info["names"] == ["a", "b"]
    assert info["model"]["max_model_len"] == 256
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", None)
    assert (info["state"], info["weight_version"], info["live_ranks"]) == ("running", 0, 1)


async def test_the_load_is_that_of_the_ranks_that_live(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        frontend.fleet.snapshot = SNAPSHOT
        body = (await frontend.http.get("/load")).json()
    assert body["server_load"] == 5
    assert [row["rank"] for row in body["ranks"]] == [0]
    assert body["ranks"][0]["kv_used_blocks"] == 25


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/audio/speech", "/x"])
async def test_what_is_not_served_is_a_404_that_says_so(tmp_path, path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        error = await frontend.error(path, {"input": "x"}, 404)
    assert error["message"] == f"POST {path} is not served here"


async def test_the_page_and_its_figures_are_served(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        gathered = {"requests": 1, "clients": 1, "ranks": [], "recent": []}
        frontend.fleet.snapshot = SNAPSHOT | gathered
        assert "<html" in (await frontend.http.get("/")).text
        assert (await frontend.http.get("/fleet")).json()["live_ranks"] == 1


async def test_metrics_are_the_coordinators_totals(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        frontend.fleet.snapshot = SNAPSHOT
        response = await frontend.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        "homing_live_ranks 1.0",
        "homing_requests_submitted_total 42.0",
        "homing_requests_resubmitted_total 2.0",
        "homing_prompt_tokens_total 1000.0",
        "homing_generation_tokens_total 70.0",
        "homing_prefix_cache_queries_total 1000.0",
        "homing_prefix_cache_hits_total 600.0",
        'homing_request_success_total{finished_reason="stop"} 30.0',
        'homing_request_success_total{finished_reason="length"} 10.0',
        'homing_num_requests_running{rank="0"} 4.0',
        'homing_num_requests_waiting{rank="0"} 1.0',
        'homing_kv_cache_usage_perc{rank="0"} 0.25',
        'homing_kv_cache_usage_perc{rank="1"} 0.0',
        'homing_rank_up{rank="1"} 0.0',
        'homing_requests_dispatched_total{rank="0"} 41.0',
    ):
        assert line in lines


async def test_what_a_frontend_measures_is_told_to_the_coordinator_and_by_it(tmp_path):
    script = says(byte_ids("abc"), num_cached_tokens=2)
    async with serving(tmp_path, script) as frontend:
        await frontend.post("/v1/completions", {"prompt": "wxyz", "n": 2, "max_tokens": 3})
        await frontend.stream("/v1/completions", {"prompt": "x"})
        await frontend.error("/v1/completions", {"prompt": "x", "n": 0}, 400)
        totals = SNAPSHOT["totals"] | frontend.measures.counters()
        frontend.fleet.snapshot = SNAPSHOT | {"totals": totals}
        lines = (await frontend.http.get("/metrics")).text.splitlines()
    for line in (
        "homing_time_to_first_token_seconds_count 3.0",
        'homing_time_to_first_token_seconds_bucket{le="+Inf"} 3.0',
        "homing_inter_token_latency_seconds_count 6.0",
        "homing_e2e_request_latency_seconds_count 2.0",
        'homing_request_prompt_tokens_bucket{le="1"} 1.0',
        'homing_request_prompt_tokens_bucket{le="4"} 2.0',
        "homing_request_prompt_tokens_sum 5.0",
        "homing_request_cached_tokens_sum 4.0",
        "homing_request_generation_tokens_sum 9.0",
        "homing_request_queue_time_seconds_count 0.0",
    ):
        assert line in lines


async def test_metrics_without_a_coordinator_are_503(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        frontend.fleet.fleet = replace(frontend.fleet.fleet, connected=False)
        assert (await frontend.http.get("/metrics")).status_code == 503
