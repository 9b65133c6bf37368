"""Whether the fleet serves, asked as a client would ask: over HTTP.

The kernel picks the frontend that answers a connection, so each answer names its process: the fleet
is ready once every frontend has been heard to say that all engine ranks serve.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
from dataclasses import dataclass, field
from typing import Any

from homing.errors import Unavailable

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
POLL_S = 0.1
# A deadline is long; without a word in between it looks like a hang.
REPORT_EVERY_S = 10.0


@dataclass
class Fleet:
    """What is expected, and what was heard of it."""

    host: str
    port: int
    num_frontends: int
    num_ranks: int
    tls: bool = False
    # process id of a frontend -> the engine ranks that it last said are live
    live_ranks_of_frontend: dict[int, int] = field(default_factory=dict[int, int])

    def is_ready(self) -> bool:
        ready = [n for n in self.live_ranks_of_frontend.values() if n >= self.num_ranks]
        return len(ready) >= self.num_frontends

    def describe(self) -> str:
        """What the fleet is still waiting for."""
        live = max(self.live_ranks_of_frontend.values(), default=0)
        frontends = len(self.live_ranks_of_frontend)
        return (
            f"{live} of {self.num_ranks} engine ranks serve, "
            f"{frontends} of {self.num_frontends} frontends answer"
        )


async def wait_until_ready(fleet: Fleet, *, timeout_s: float) -> str:
    """Returns the name of the served model. Raises Unavailable after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _hear_every_frontend(fleet)
    except TimeoutError:
        raise Unavailable(f"not ready after {timeout_s:g} s: {fleet.describe()}") from None


async def _hear_every_frontend(fleet: Fleet) -> str:
    """Returns the model's name, as soon as all serve."""
    loop = asyncio.get_running_loop()
    next_report = loop.time() + REPORT_EVERY_S
    last_said = ""
    while True:
        health = await asyncio.to_thread(_get_health, fleet)
        if health is not None:
            serves = health["status"] == "ok"
            fleet.live_ranks_of_frontend[health["pid"]] = health["live_ranks"] if serves else 0
            if fleet.is_ready():
                return health["model"]
        if fleet.describe() != last_said or loop.time() >= next_report:
            last_said = fleet.describe()
            next_report = loop.time() + REPORT_EVERY_S
            logger.info("starting: %s", last_said)
        await asyncio.sleep(POLL_S)


def _get_health(fleet: Fleet) -> dict[str, Any] | None:
    """The answer, whatever its status; None while nobody gives one."""
    connection = _connection(fleet)
    try:
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _connection(fleet: Fleet) -> http.client.HTTPConnection:
    if not fleet.tls:
        return http.client.HTTPConnection(fleet.host, fleet.port, timeout=ANSWER_TIMEOUT_S)
    # The certificate is for the name that clients use, which is not the one used here.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(
        fleet.host, fleet.port, timeout=ANSWER_TIMEOUT_S, context=context
    )
