"""What every test process needs before anything else is imported."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from homing.observe.logs import LineFormatter

# OpenMP threads that wait must not spin: tests run many processes on few cores, and one that spins
# takes the core from the one it waits for. Read when torch loads, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, and no judgement by the clock: a busy machine is no fault.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Until all tests are collected: what that imports and makes stays.
gc.disable()

# Of a folder of tests: those whose files take long come first.
TURNS = {"process": 0, "clients": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` hands out whole files in this order: short ones last keep all workers busy."""
    items.sort(key=lambda item: TURNS.get(item.path.parent.name, 2))


def pytest_collection_finish() -> None:
    """What was imported stays: the collections below need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def told_of_here() -> Iterator[None]:
    """What a file's tests left open, a socket or a process, is told of in that file, as an error
    of its last test; not whenever the garbage collector happens to find it, in some other file."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What `configure_logging` sets up writes to a stderr that may be one test's alone."""
    root, homing = logging.getLogger(), logging.getLogger("homing")
    levels = root.level, homing.level
    yield
    for handler in list(root.handlers):
        if isinstance(handler.formatter, LineFormatter):
            root.removeHandler(handler)
    root.setLevel(levels[0])
    homing.setLevel(levels[1])
    logging.captureWarnings(False)
