"""Control routes: what they tell the fleet, who may use them, and that repeats are harmless."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from homing.errors import CommandFailed, NotAllowed
from homing.frontend import status
from homing.frontend.access import AccessSettings
from homing.wire import Command, FleetState
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import Frontend, serving, until

C = Command
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PAUSE = (C.PAUSE, {"mode": "keep"})
SUSPEND = (C.SUSPEND, {"kv": "discard", "weights": "offload"})


def update(**fields: Any) -> tuple[Command, dict[str, Any]]:
    defaults = {"source": "directory", "path": "/w"}
    return (C.UPDATE_WEIGHTS, defaults | fields)


def with_control(tmp_path, **access: Any):
    return serving(tmp_path, says(byte_ids("x")), access=AccessSettings(**access))


async def call(frontend: Frontend, path: str, body: Any = None) -> dict[str, Any]:
    response = await frontend.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("path", "body", "commands", "state"),
    [
        ("/pause", None, [PAUSE], "paused"),
        ("/pause/", {}, [PAUSE], "paused"),
        ("/pause?mode=wait", None, [(C.PAUSE, {"mode": "wait"})], "paused"),
        ("/pause", {"mode": "abort"}, [(C.PAUSE, {"mode": "abort"})], "paused"),
        ("/pause?clear_cache=true", {}, [PAUSE, (C.RESET_PREFIX_CACHE, None)], "paused"),
        ("/pause?clear_cache=false", {"mode": None}, [PAUSE], "paused"),
        ("/pause_generation", {}, [(C.PAUSE, {"mode": "abort"})], "paused"),
        ("/pause_generation", {"mode": "in_place"}, [PAUSE], "paused"),
        ("/resume", None, [(C.UNPAUSE, None)], "running"),
        ("/continue_generation", {}, [(C.UNPAUSE, None)], "running"),
        ("/sleep", None, [PAUSE, SUSPEND], "suspended"),
        ("/sleep?level=2&mode=abort", None, [(C.PAUSE, {"mode": "abort"}), SUSPEND], "suspended"),
        ("/sleep?level=0", None, [PAUSE], "paused"),
        (
            "/sleep",
            {"tags": ["kv_cache"]},
            [PAUSE, (C.SUSPEND, {"kv": "discard", "weights": "keep"})],
            "suspended",
        ),
        (
            "/sleep",
            {"kv": "offload", "weights": "keep"},
            [PAUSE, (C.SUSPEND, {"kv": "offload", "weights": "keep"})],
            "suspended",
        ),
        ("/update_weights", {"path": "/w"}, [update()], "running"),
        ("/update_weights", {"weight_dir": "/w"}, [update()], "running"),
        ("/update_weights_from_disk", {"model_path": "/w"}, [update()], "running"),
        (
            "/update_weights",
            {"path": "/w", "weight_version": 7, "partial": True, "in_flight": "recompute"},
            [update(epoch=7, partial=True, in_flight="recompute")],
            "running",
        ),
        (
            "/update_weight_version",
            {"weight_version": 5},
            [(C.SET_EPOCH, {"epoch": 5})],
            "running",
        ),
    ],
)
async def test_a_route_tells_the_fleet_what_it_says(tmp_path, path, body, commands, state):
    async with with_control(tmp_path) as frontend:
        reply = await call(frontend, path, body)
        assert reply == {"status": state, "weight_version": 0}
        assert frontend.fleet.commands == commands


@pytest.mark.parametrize(
    ("path", "commands", "state"),
    [
        ("/wake_up", [(C.RESUME, None), (C.UNPAUSE, None)], "running"),
        ("/wake_up?tags=weights", [(C.RESUME, None)], "paused"),
        ("/wake_up?tags=kv_cache", [(C.RESUME, None), (C.UNPAUSE, None)], "running"),
        ("/resume_memory_occupation", [(C.RESUME, None), (C.UNPAUSE, None)], "running"),
    ],
)
async def test_a_fleet_that_sleeps_is_woken(tmp_path, path, commands, state):
    async with with_control(tmp_path) as frontend:
        await call(frontend, "/sleep")
        assert (await frontend.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await frontend.http.get("/is_paused/")).json() == {"is_paused": True}
        frontend.fleet.commands.clear()
        assert (await call(frontend, path))["status"] == state
        assert frontend.fleet.commands == commands
        assert (await frontend.http.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_weights_that_trained_in_process_are_a_group(tmp_path):
    tensors = [["w", "bfloat16", [2, 3]]]
    group = {"host": "h", "port": 1, "ranks": [0, 1], "tensors": tensors}
    async with with_control(tmp_path) as frontend:
        await call(frontend, "/update_weights", {"group": group})
        [(_, arguments)] = frontend.fleet.commands
    assert arguments["source"] == "group"
    assert arguments["group"]["ranks"] == (0, 1)


async def test_the_weight_version_is_that_of_the_fleet(tmp_path):
    async with with_control(tmp_path) as frontend:
        frontend.fleet.fleet = replace(frontend.fleet.fleet, epoch=9)
        assert (await frontend.http.get("/weight_version")).json() == {"weight_version": 9}


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/reset_prefix_cache/", "/flush_cache"])
async def test_the_prefix_cache_is_reset_on_all_ranks(tmp_path, path):
    async with with_control(tmp_path) as frontend:
        assert await call(frontend, path) == {"dropped_blocks": 0}
        assert frontend.fleet.commands == [(C.RESET_PREFIX_CACHE, None)]


@pytest.mark.parametrize(
    ("path", "body", "aborted"),
    [
        ("/abort", {"request_id": "r1"}, ["r1", "r1"]),
        ("/abort", {"rid": "r10"}, ["r10"]),
        ("/abort?request_id=r10", None, ["r10"]),
        ("/abort_request", {"rid": "r1"}, ["r1", "r1"]),
        ("/abort_requests", {"request_ids": ["r1", "r10"]}, ["r1", "r1", "r10"]),
        ("/abort", {"request_id": "chatcmpl-r10"}, ["r10"]),
        ("/abort", {"request_id": "r"}, []),
        ("/abort_request", {"abort_all": True}, ["r1", "r1", "r10"]),
    ],
)
async def test_requests_are_aborted_by_their_exact_names_or_all(tmp_path, path, body, aborted):
    never = asyncio.Event()
    access = AccessSettings()
    async with serving(tmp_path, lambda prompt, params: [never], access=access) as frontend:
        names = ["r1", "r1", "r10"]
        asking = [
            asyncio.create_task(frontend.post("/v1/chat/completions", CHAT | {"rid": name}))
            for name in names
        ]
        await until(lambda: len(frontend.fleet.running) == len(names))
        assert await call(frontend, path, body) == {"aborted": len(aborted)}
        assert await call(frontend, "/abort", {"abort_all": True}) == {
            "aborted": len(names) - len(aborted)
        }
        replies = await asyncio.gather(*asking)
    assert {reply["choices"][0]["finish_reason"] for reply in replies} == {"abort"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause", {"mode": "soft"}, "mode"),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache"),
        ("/sleep", {"tags": ["all"]}, "tags"),
        ("/abort", {}, "request_id"),
        ("/abort", {"request_ids": "r1"}, "request_ids"),
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": "/w", "group": None, "weight_version": "x"}, "weight_version"),
        ("/update_weight_version", {}, "weight_version"),
        ("/drain", {}, "rank"),
        ("/drain", {"rank": -1}, "rank"),
        ("/drain", {"rank": 0, "timeout_s": 86401}, "timeout_s"),
        ("/pause", "[]", None),
        ("/pause", "{", None),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(tmp_path, path, body, param):
    async with with_control(tmp_path) as frontend:
        assert (await frontend.error(path, body, 400))["param"] == param
        assert not frontend.fleet.commands
        assert not frontend.fleet.drained


@pytest.mark.parametrize(
    ("path", "body", "drained"),
    [
        ("/drain", {"rank": 3}, (3, 30.0)),
        ("/drain?rank=3", None, (3, 30.0)),
        ("/drain/", {"rank": 3, "timeout_s": 0}, (3, 0.0)),
    ],
)
async def test_a_rank_is_drained(tmp_path, path, body, drained):
    async with with_control(tmp_path) as frontend:
        assert await call(frontend, path, body) == {"rank": 3}
        assert frontend.fleet.drained == [drained]


async def test_a_rank_that_cannot_be_drained_is_409(tmp_path):
    async with with_control(tmp_path) as frontend:
        frontend.fleet.control_error = NotAllowed("there is no rank 3")
        assert (await frontend.error("/drain", {"rank": 3}, 409))["code"] == "not_allowed"


async def test_what_the_fleets_state_forbids_is_409(tmp_path):
    async with with_control(tmp_path) as frontend:
        frontend.fleet.control_error = NotAllowed("resume it before you unpause it")
        error = await frontend.error("/resume", "", 409)
        assert error["code"] == "not_allowed"


async def test_a_command_that_a_rank_could_not_carry_out_is_500_and_says_which(tmp_path):
    async with with_control(tmp_path) as frontend:
        frontend.fleet.control_error = CommandFailed("rank 1: no such directory")
        error = await frontend.error("/update_weights", {"path": "/w"}, 500)
        assert error["code"] == "command_failed"
        assert "rank 1" in error["message"]


@pytest.mark.parametrize(
    ("access", "key", "expected"),
    [
        ({}, None, 200),
        ({"is_public": True}, None, 403),
        ({"is_public": True, "admin_keys": ("root",)}, "root", 200),
        ({"admin_keys": ("root",)}, None, 401),
        ({"admin_keys": ("root",), "api_keys": ("user",)}, "user", 401),
        ({"admin_keys": ("root",), "api_keys": ("user",)}, "root", 200),
        ({"api_keys": ("user",)}, "user", 200),
        ({"api_keys": ("user",)}, None, 401),
    ],
)
async def test_control_needs_the_admin_key_or_a_socket_that_others_do_not_reach(
    tmp_path, access, key, expected
):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with with_control(tmp_path, **access) as frontend:
        for path in ("/pause", "/abort?abort_all=1", "/reset_prefix_cache", "/drain?rank=0"):
            response = await frontend.http.post(path, headers=headers)
            assert response.status_code == expected
        response = await frontend.http.get("/is_paused", headers=headers)
        assert response.status_code == expected


async def test_deep_health_generates_a_token_unless_the_fleet_is_paused(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "HEALTH_TIMEOUT_S", 0.2)
    never = asyncio.Event()
    answers = [says(byte_ids("x")), lambda prompt, params: [never]]
    async with serving(tmp_path, lambda prompt, params: answers[0](prompt, params)) as frontend:
        assert (await frontend.http.get("/health_generate")).json()["status"] == "ok"
        assert frontend.fleet.submitted[-1].params.num_tokens_to_generate == 1
        answers.pop(0)
        response = await frontend.http.get("/health_generate")
        assert response.status_code == 503
        assert not frontend.fleet.running
        frontend.fleet.fleet = replace(frontend.fleet.fleet, state=FleetState.PAUSED)
        response = await frontend.http.get("/health_generate/")
        assert (response.status_code, response.json()["state"]) == (200, "paused")
