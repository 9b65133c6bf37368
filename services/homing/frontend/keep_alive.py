"""How long an idle connection stays: Hypercorn's server of a connection, with its watch replaced.

Hypercorn ends a task when a request begins, and starts another, with one inside, when it is
answered; that was a seventh of a short request. And the task keeps a connection open that its
client closed, until the time is over: a client that connects for each request would soon have used
up what a process may open. Here one task watches a connection from its first moment to its last.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer

GOODBYE_S = 1.0
"""For a client to close its end of a TLS connection, which those of idle ones seldom do."""


class IdleWatch:
    """Closes a connection that was idle for so long, or is idle when the server stops."""

    def __init__(self, server: ConnectionServer) -> None:
        self._server = server
        self._timeout_s = server.config.keep_alive_timeout
        self._stopping = server.context.terminated
        self._idle_since: float | None = None
        self._task: asyncio.Task[None] | None = None

    # What Hypercorn calls; each request is between `stop` and `restart`.

    async def restart(self, task_group: object, action: object) -> None:
        """It is idle from now on. Hypercorn's own watch, `action`, is not begun."""
        self._idle_since = self._server.loop.time()
        if self._task is None or self._stopping.is_set():
            self._task = self._server.loop.create_task(self._watch())

    async def stop(self) -> None:
        """It is not."""
        self._idle_since = None

    @property
    def is_idle(self) -> bool:
        return self._idle_since is not None

    def end(self) -> None:
        """The connection is closed."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        wait_s = self._timeout_s
        while wait_s > 0:
            try:
                await asyncio.wait_for(self._stopping.wait(), wait_s)
            except TimeoutError:
                pass
            else:
                break
            since = self._idle_since
            wait_s = self._timeout_s
            if since is not None:
                wait_s -= self._server.loop.time() - since
        await asyncio.shield(self._server.close_idle())


class ConnectionServer(TCPServer):
    """Of one connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._watch = IdleWatch(self)
        self.idle_task = self._watch  # pyright: ignore[reportAttributeAccessIssue]

    async def close_idle(self) -> None:
        """Close it, unless it is idle no more."""
        if self._watch.is_idle:
            await self._initiate_server_close()
            self.loop.call_later(GOODBYE_S, self._give_up)

    def _give_up(self) -> None:
        """Nothing of an answer is left to send; what is missing is the client's own goodbye."""
        if not self.writer.transport.get_write_buffer_size():
            self.writer.transport.abort()

    async def _close(self) -> None:
        self._watch.end()
        task = asyncio.current_task()
        if task and task.cancelling():  # the time of a stop is over
            self.writer.transport.abort()
        await super()._close()


def use_connection_servers() -> None:
    """Let Hypercorn serve connections so. It has no setting for it."""
    run.TCPServer = ConnectionServer  # pyright: ignore[reportPrivateImportUsage]
