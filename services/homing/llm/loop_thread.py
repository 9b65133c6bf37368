"""An event loop on a thread of its own: for callers that have none, or one that may end before the
work does, as in a script, a notebook or several `asyncio.run` after each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SHUT_DOWN = "it was shut down"


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it on the loop; from any thread. Cancelling the future cancels the work; what
        `close` interrupts raises RuntimeError."""
        if self._closing:
            work.close()
            raise RuntimeError(SHUT_DOWN)
        return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the loop, and wait; an exception here, such as KeyboardInterrupt, cancels it."""
        if self.is_current:
            work.close()
            raise RuntimeError("called from its own event loop: it would wait for itself")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        """Whether this is called on it."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel what is left, and end the thread. Idempotent."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._closing:
                raise RuntimeError(SHUT_DOWN) from None
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
