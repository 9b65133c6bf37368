from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from homing.errors import ConfigError
from homing.launch.listeners import open_listeners


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_for(stack: ExitStack, port: int, count: int) -> list[socket.socket]:
    listeners = open_listeners("127.0.0.1", port, count)
    for listener in listeners:
        stack.enter_context(listener)
    return listeners


def test_all_sockets_listen_on_the_one_port_that_was_free(opened: ExitStack) -> None:
    listeners = open_for(opened, 0, 3)
    ports = {listener.getsockname()[1] for listener in listeners}
    assert len(ports) == 1
    assert ports != {0}


def test_connections_are_spread_over_the_sockets(opened: ExitStack) -> None:
    listeners = open_for(opened, 0, 2)
    for listener in listeners:
        listener.setblocking(False)
    accepted: Counter[int] = Counter()
    for _ in range(64):
        opened.enter_context(socket.create_connection(listeners[0].getsockname()))
        for index, listener in enumerate(listeners):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            opened.enter_context(connection)
            accepted[index] += 1
    assert sum(accepted.values()) == 64
    assert min(accepted[0], accepted[1]) >= 8


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_launch_on_the_port_fails_though_the_first_shares_it(
    opened: ExitStack, count: int
) -> None:
    port = open_for(opened, 0, 2)[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        open_listeners("127.0.0.1", port, count)


def test_a_port_that_another_program_shares_is_not_taken(opened: ExitStack) -> None:
    other = opened.enter_context(socket.socket())
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind(("127.0.0.1", 0))
    other.listen()
    with pytest.raises(ConfigError, match="Address already in use"):
        open_listeners("127.0.0.1", other.getsockname()[1], 2)


def test_a_port_is_free_again_at_once_though_old_connections_linger() -> None:
    with ExitStack() as stack:
        (listener,) = open_for(stack, 0, 1)
        port = listener.getsockname()[1]
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        connection, _ = listener.accept()
        connection.close()  # this end closes first and lingers
        assert client.recv(1) == b""
    for again in open_listeners("127.0.0.1", port, 2):
        again.close()


def test_a_host_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        open_listeners("192.0.2.1", 0, 1)


def test_a_host_that_is_no_address_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match="--host nowhere is not an address"):
        open_listeners("nowhere", 0, 1)
