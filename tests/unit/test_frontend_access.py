"""Keys, pages of other origins and TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess

import pytest

from homing.errors import ConfigError
from homing.frontend.access import AccessSettings, is_public
from homing.frontend.config import FrontendConfig
from homing.frontend.server import TlsFiles
from tests.support.byte_model import byte_ids
from tests.support.fake_fleet import says
from tests.support.http_frontend import serving, strict_json

MODELS = "/v1/models"
PAGE = "https://page.example"
KEYS = AccessSettings(api_keys=("one", "two"), admin_keys=("root",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_without_keys_everybody_is_served(tmp_path):
    async with serving(tmp_path, says(byte_ids("x"))) as frontend:
        assert (await frontend.http.get(MODELS)).status_code == 200
        assert (await frontend.http.get(MODELS, headers=bearer("any"))).status_code == 200


@pytest.mark.parametrize("key", ["one", "two", "root"])
async def test_each_key_opens_the_model(tmp_path, key):
    async with serving(tmp_path, says(byte_ids("x")), access=KEYS) as frontend:
        assert (await frontend.http.get(MODELS, headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("three"),
        {"Authorization": "Bearer"},
        bearer("on"),
        {"Authorization": "one"},
        bearer("onetwo"),
    ],
)
async def test_no_key_and_no_right_one_are_401_in_the_shape_of_openai(tmp_path, headers):
    async with serving(tmp_path, says(byte_ids("x")), access=KEYS) as frontend:
        response = await frontend.http.get(MODELS, headers=headers)
        assert response.status_code == 401
        assert strict_json(response.text)["error"]["code"] == "invalid_api_key"
        assert response.headers["WWW-Authenticate"] == "Bearer"
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await frontend.http.post("/v1/chat/completions", json=chat, headers=headers)
        assert response.status_code == 401
        assert not frontend.fleet.submitted


async def test_each_key_is_a_tenant_of_its_own_and_the_same_at_every_frontend(tmp_path):
    tenants: list[list[int | None]] = []
    for access in (KEYS, KEYS, AccessSettings()):
        async with serving(tmp_path, says(byte_ids("x")), access=access) as frontend:
            for key in ("one", "two", "one"):
                body = {"prompt": "hi"}
                path = "/v1/completions"
                response = await frontend.http.post(path, json=body, headers=bearer(key))
                assert response.status_code == 200
            tenants.append([generation.tenant for generation in frontend.fleet.submitted])
    first, second, without_keys = tenants
    assert first == second
    assert first[0] == first[2] != first[1]
    assert all(tenant is not None and 0 <= tenant < 2**63 for tenant in first)
    assert without_keys == [None] * 3


@pytest.mark.parametrize("path", ["/health", "/health/", "/version", "/", "/page/page.js"])
async def test_probes_and_the_page_need_no_key(tmp_path, path):
    async with serving(tmp_path, says(byte_ids("x")), access=KEYS) as frontend:
        assert (await frontend.http.get(path)).status_code == 200


async def test_pages_of_other_origins_are_not_helped_unless_allowed(tmp_path):
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with serving(tmp_path, says(byte_ids("x")), access=KEYS) as frontend:
        response = await frontend.http.options(MODELS, headers=preflight)
        assert "Access-Control-Allow-Origin" not in response.headers
        response = await frontend.http.get("/health", headers={"Origin": PAGE})
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("allowed", "answer"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.example",), None)]
)
async def test_pages_of_allowed_origins_may_ask_and_read(tmp_path, allowed, answer):
    access = AccessSettings(api_keys=("one",), allowed_origins=allowed)
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-own",
    }
    async with serving(tmp_path, says(byte_ids("x")), access=access) as frontend:
        asked = await frontend.http.options("/v1/chat/completions", headers=preflight)
        read = await frontend.http.get(MODELS, headers={"Origin": PAGE, **bearer("one")})
        refused = await frontend.http.get(MODELS, headers={"Origin": PAGE})
    assert asked.headers.get("Access-Control-Allow-Origin") == answer
    if answer:
        assert asked.status_code == 204
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization,x-own"
    assert read.headers.get("Access-Control-Allow-Origin") == answer
    assert refused.status_code == 401
    assert refused.headers.get("Access-Control-Allow-Origin") == answer
    assert read.headers["Vary"] == "Origin"


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \n")
    monkeypatch.setenv("HOMING_API_KEY", "four")
    monkeypatch.setenv("HOMING_ADMIN_API_KEY", "root")
    config = FrontendConfig(coordinator="x", api_key=("one",), api_key_file=str(file))
    assert config.read_api_keys() == ("one", "four", "two", "three")
    assert config.read_admin_keys() == ("root",)
    missing = FrontendConfig(coordinator="x", api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="API keys cannot be read"):
        missing.read_api_keys()


def test_sockets_on_loopback_are_not_public(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not is_public(listener)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert is_public(listener)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert not is_public(listener)


async def test_a_certificate_makes_it_https(tmp_path, certificate):
    async with serving(tmp_path / "model", says(byte_ids("x")), tls=certificate) as frontend:
        assert frontend.http.base_url.scheme == "https"
        body = await frontend.post("/v1/completions", {"prompt": "x"})
        assert body["choices"][0]["text"] == "x"
        assert len(await frontend.stream("/v1/completions", {"prompt": "x"})) == 1


async def test_a_stop_does_not_wait_for_the_goodbye_of_an_idle_client(tmp_path, certificate):
    """Who has an idle connection in its pool does not read it, and so answers no goodbye."""
    files = {"tls": certificate, "drain_s": 100.0}
    async with serving(tmp_path / "model", says(byte_ids("x")), **files) as frontend:
        trusting = ssl.create_default_context(cafile=certificate.certificate)
        trusting.check_hostname = False

        def connected() -> ssl.SSLSocket:
            client = socket.create_connection((frontend.host, frontend.port))
            return trusting.wrap_socket(client)

        with await asyncio.to_thread(connected):
            frontend.stop.set()
            await asyncio.wait_for(frontend.serving, 30.0)


async def test_a_certificate_that_is_none_is_a_config_error(tmp_path):
    (tmp_path / "c").write_text("x")
    files = TlsFiles(str(tmp_path / "c"), str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="certificate"):
        async with serving(tmp_path / "model", says(byte_ids("x")), tls=files):
            pass


@pytest.fixture
def certificate(tmp_path) -> TlsFiles:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes a certificate with openssl")
    files = TlsFiles(str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem"))
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    subprocess.run(
        [openssl, *make.split(), "-out", files.certificate, "-keyout", files.key],
        check=True,
        capture_output=True,
    )
    return files
