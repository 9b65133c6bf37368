"""The thread that encodes prompts: one job at a time, and a bounded number of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from homing.errors import ContextLengthExceeded, Overloaded
from homing.frontend import tokenizing
from homing.frontend.tokenizing import TokenizerThread, encode_within
from homing.tokenizer import Tokenizer
from tests.support.byte_model import byte_level


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_dir(byte_level(tmp_path))


@pytest.fixture
def thread():
    thread = TokenizerThread()
    yield thread
    thread.close()


async def test_the_event_loop_goes_on_while_a_job_runs(thread):
    gate = threading.Event()
    job = asyncio.create_task(thread.prepare(lambda: gate.wait(30)))
    await asyncio.sleep(0)
    gate.set()  # only a loop that is free gets here
    assert await job


async def test_jobs_beyond_the_limit_are_refused(thread, monkeypatch):
    monkeypatch.setattr(tokenizing, "MAX_WAITING", 2)
    gate = threading.Event()
    jobs = [asyncio.create_task(thread.prepare(lambda: gate.wait(30))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 prompts wait"):
        await thread.prepare(lambda: None)
    gate.set()
    assert await asyncio.gather(*jobs) == [True, True]
    assert await thread.prepare(lambda: "again") == "again"


async def test_a_caller_that_leaves_takes_its_waiting_job_with_it(thread):
    gate = threading.Event()
    ran = []
    first = asyncio.create_task(thread.prepare(lambda: gate.wait(30)))
    second = asyncio.create_task(thread.prepare(lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await thread.prepare(lambda: None)
    assert ran == []


def test_a_text_that_is_far_too_long_is_refused_without_being_encoded(tokenizer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)  # calling it would fail
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens"):
        encode_within(tokenizer, "x" * 10_000, 100, add_special_tokens=True)
