"""The page's files and the JSON they read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from quart import Quart

from homing.client import FleetView
from homing.coordinator.loads import RankLoads
from homing.coordinator.peers import Peers
from homing.coordinator.snapshot import fleet_snapshot
from homing.coordinator.totals import ReportedCounters, Totals
from homing.frontend import page
from homing.frontend.page import fleet_json
from tests.support.demo_fleet import DemoFleet, demo_app

ASSETS = Path(page.__file__).parent / "assets"
KINDS = {".css": "text/css", ".js": "text/javascript"}
FILES = {file.name: kind for end, kind in KINDS.items() for file in ASSETS.glob(f"*{end}")}


async def test_a_fleet_is_its_ranks_and_its_totals():
    demo = DemoFleet()
    fleet = fleet_json(await demo.snapshot(), demo.view())
    assert fleet["model"] == {"name": "SmolLM2-135M-Instruct", "max_context_tokens": 8192}
    assert (fleet["state"], fleet["policy"], fleet["epoch"]) == ("running", "prefix_affinity", 0)
    assert fleet["live_ranks"] == 2
    assert fleet["requests"] == sum(row["load"] for row in fleet["ranks"])
    assert [row["live"] for row in fleet["ranks"]] == [True, True, False]
    row = fleet["ranks"][0]
    assert (row["load"], row["running"], row["waiting"]) == (3, 2, 1)
    assert row["prompt_tokens"] == 1300
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
        assert fleet["totals"][name] == sum(row[name] for row in fleet["ranks"])
    assert fleet["totals"]["refused"] == 1
    assert fleet["recent"] == []


async def test_ttft_is_there_only_if_the_engines_measure_it():
    demo = DemoFleet()
    assert fleet_json(await demo.snapshot(), demo.view())["ttft"] is None
    demo.measures_ttft = True
    ttft = fleet_json(await demo.snapshot(), demo.view())["ttft"]
    assert ttft is not None
    assert ttft["count"] == 2


def test_the_coordinators_own_snapshot_is_understood_before_anyone_joined():
    snapshot = fleet_snapshot(
        Peers(max_clients=1), RankLoads(max_load=1), Totals(), ReportedCounters(), lambda _: ""
    )
    fleet = fleet_json(snapshot | {"recent": []}, FleetView())
    assert (fleet["ranks"], fleet["live_ranks"], fleet["model"]) == ([], 0, None)
    assert fleet["totals"]["generated_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), *((f"/page/{name}", kind) for name, kind in FILES.items())],
)
async def test_the_files_allow_nothing_from_elsewhere(path, kind):
    response = await demo_app(DemoFleet(), words=[]).test_client().get(path)
    assert response.status_code == 200
    assert response.content_type == f"{kind}; charset=utf-8"
    assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
    text = await response.get_data(as_text=True)
    addresses = set(re.findall(r"https?://[^\s'\"]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nobody looks up


async def test_the_fleet_is_never_cached():
    app = demo_app(DemoFleet(), words=[])
    response = await app.test_client().get("/fleet")
    assert response.headers["Cache-Control"] == "no-store"
    assert (await response.get_json())["live_ranks"] == 2


async def test_a_coordinator_that_does_not_answer_is_an_error_of_the_frontend():
    demo = DemoFleet()
    demo.down = True
    response = await demo_app(demo, words=[]).test_client().get("/fleet")
    assert response.status_code == 503
    assert (await response.get_json())["error"]["message"] == "the coordinator does not answer"


def test_every_element_that_the_scripts_name_is_in_the_page():
    html = (ASSETS / "index.html").read_text()
    script = "".join(file.read_text() for file in ASSETS.glob("*.js"))
    named = set(re.findall(r'\$\("#([\w-]+)', script)) | set(re.findall(r'figure\("(\w+)"', script))
    assert named
    assert named <= set(re.findall(r'id="([\w-]+)"', html))


def test_every_file_is_loaded_by_the_page_or_by_a_script():
    html = (ASSETS / "index.html").read_text()
    scripts = "".join(file.read_text() for file in ASSETS.glob("*.js"))
    loaded = re.findall(r'(?:href|src)="page/([^"]+)"', html)
    loaded += re.findall(r'^import [^;]*"\./([^"]+)";', scripts, re.MULTILINE)
    assert set(loaded) == set(FILES)


def test_the_page_is_a_blueprint_that_any_app_can_take():
    demo = DemoFleet()
    app = Quart(__name__)
    app.register_blueprint(page.page_routes(demo.snapshot, demo.view))
    assert {rule.rule for rule in app.url_map.iter_rules()} >= {"/", "/fleet", "/page/page.js"}
