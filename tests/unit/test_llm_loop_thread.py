"""The event loop that a fleet has for itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from homing.llm.loop_thread import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


async def forever(started: threading.Event) -> None:
    started.set()
    await asyncio.Event().wait()


def test_work_is_done_on_the_thread_and_waited_for(thread: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert thread.run(where()) == "test"


def test_what_work_raises_is_raised(thread: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        thread.run(fail())


def test_cancelling_a_future_cancels_its_work(thread: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            await forever(started)
        finally:
            ended.set()

    future = thread.submit(work())
    assert started.wait(30)
    future.cancel()
    assert ended.wait(30)
    with pytest.raises(CancelledError):
        future.result()


def test_closing_ends_work_with_an_error_that_says_so(thread: LoopThread) -> None:
    started = threading.Event()
    future = thread.submit(forever(started))
    assert started.wait(30)
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="it was shut down"):
        future.result()
    with pytest.raises(RuntimeError, match="it was shut down"):
        thread.run(forever(started))


def test_waiting_for_itself_is_refused(thread: LoopThread) -> None:
    async def nested() -> None:
        thread.run(forever(threading.Event()))

    with pytest.raises(RuntimeError, match="it would wait for itself"):
        thread.run(nested())
