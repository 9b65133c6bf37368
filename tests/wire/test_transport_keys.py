"""Keys: who gets in, as what, and what happens to everybody else."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.errors import ConfigError
from homing.transport import Dealer, Keys, Router, peer_identity, read_keys, write_keys

ENGINE, CLIENT = peer_identity("engine", 1), peer_identity("client", 2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def router(directory: Path) -> Iterator[Router]:
    keys = read_keys(directory, "coordinator")
    router = Router("tcp://127.0.0.2:0", send_queue=10, keys=keys)
    yield router
    router.close()


def received(
    router: Router, count: int, timeout_s: float = 30.0
) -> list[tuple[bytes, list[bytes]]]:
    """The first `count` messages, or those that came in time."""
    messages: list[tuple[bytes, list[bytes]]] = []
    deadline = time.monotonic() + timeout_s
    while len(messages) < count and time.monotonic() < deadline:
        for sender, frames in router.receive(0.05):
            messages.append((sender, [bytes(memoryview(frame)) for frame in frames]))
    return messages


@pytest.mark.parametrize(("role", "identity"), [("engine", ENGINE), ("client", CLIENT)])
def test_who_has_the_key_of_its_role_gets_in_and_is_answered(
    router: Router, directory: Path, role: str, identity: bytes
):
    dealer = Dealer(router.address, identity, read_keys(directory, role))
    dealer.send([b"hello", bytes(100_000)])
    assert received(router, 1) == [(identity, [b"hello", bytes(100_000)])]
    router.send(identity, [b"welcome"])
    assert next(dealer.receive(30.0)) == [b"welcome"]
    dealer.close()


def test_a_client_s_key_cannot_speak_as_an_engine_nor_an_engine_s_as_a_client(
    router: Router, directory: Path
):
    liars = [
        Dealer(router.address, ENGINE, read_keys(directory, "client")),
        Dealer(router.address, CLIENT, read_keys(directory, "engine")),
    ]
    name = peer_identity("client", 9)
    honest = Dealer(router.address, name, read_keys(directory, "client"))
    numbers = [b"%d" % number for number in range(20)]
    for dealer in (*liars, honest):
        for number in numbers:
            dealer.send([number])
    assert received(router, 20) == [(name, [number]) for number in numbers]
    assert received(router, 1, 0.3) == []
    for dealer in (*liars, honest):
        dealer.close()


def test_who_has_no_key_or_another_fleet_s_gets_nowhere(
    router: Router, directory: Path, tmp_path: Path
):
    write_keys(tmp_path / "others")
    ours, theirs = (read_keys(path, "client") for path in (directory, tmp_path / "others"))
    wrong_pair = Keys("client", theirs.public, theirs.secret, ours.others)
    dealers = [Dealer(router.address, CLIENT, keys) for keys in (None, theirs, wrong_pair)]
    for dealer in dealers:
        dealer.send([b"let me in"])
    assert received(router, 1, 1.0) == []
    for dealer in dealers:
        dealer.close()


def test_a_dealer_with_keys_does_not_speak_with_a_coordinator_that_has_none(directory: Path):
    router = Router("tcp://127.0.0.1:0", send_queue=10)
    dealer = Dealer(router.address, CLIENT, read_keys(directory, "client"))
    dealer.send([b"secret"])
    assert received(router, 1, 0.5) == []
    dealer.close()
    router.close()


# Files


def test_key_files_are_for_this_user_alone_and_hold_what_their_role_needs(directory: Path):
    for role in ("coordinator", "engine", "client"):
        path = directory / f"{role}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_keys(path, role) == read_keys(directory, role)
    coordinator, engine, client = (
        read_keys(directory, role) for role in ("coordinator", "engine", "client")
    )
    assert coordinator.others == {"engine": engine.public, "client": client.public}
    assert engine.others == client.others == {"coordinator": coordinator.public}
    secrets = {keys.secret.decode() for keys in (coordinator, engine, client)}
    for role in ("engine", "client"):
        text = (directory / f"{role}.key").read_text()
        assert sum(secret in text for secret in secrets) == 1


def test_keys_are_not_overwritten(directory: Path):
    before = (directory / "engine.key").read_text()
    with pytest.raises(ConfigError, match="there already"):
        write_keys(directory)
    assert (directory / "engine.key").read_text() == before


def test_a_key_file_that_others_can_read_is_refused(directory: Path):
    (directory / "engine.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(directory, "engine")


def test_a_client_s_key_file_is_no_engine_s(directory: Path):
    with pytest.raises(ConfigError, match=r"client\.key is no key file of a engine"):
        read_keys(directory / "client.key", "engine")


@pytest.mark.parametrize("text", ["", "role engine\n", "role engine\npublic x\nsecret y\n", "\xe9"])
def test_what_is_no_key_file_is_refused_in_one_line(directory: Path, text: str):
    (directory / "engine.key").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"key") as caught:
        read_keys(directory, "engine")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read keys"):
        read_keys(directory / "missing.key", "engine")
