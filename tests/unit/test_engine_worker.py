"""The worker's loop on a socket of the test's own, and what a failure in it does."""

from __future__ import annotations

import pytest
from typing_extensions import Buffer

from homing.errors import ConfigError
from homing.wire import (
    Goodbye,
    Hello,
    Output,
    Refused,
    Stats,
    pack,
)
from tests.support.scripted_worker import SUBMIT, WELCOME, ScriptEnded, make_worker


def test_the_loop_waits_only_while_there_is_nothing_to_do():
    worker, dealer, _ = make_worker([[pack(WELCOME)], [pack(SUBMIT)], [], [], [], [], []])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert sum(isinstance(message, Output) for message in dealer.sent) == 5
    waits = [timeout > 0 for timeout in dealer.timeouts]
    assert waits == [True, True, False, False, False, False, True, True]


def test_an_engine_that_stops_says_goodbye():
    worker, dealer, _ = make_worker([[pack(WELCOME)]])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert isinstance(dealer.sent[0], Hello)
    assert isinstance(dealer.sent[-1], Goodbye)
    assert dealer.closed


def test_a_step_that_fails_says_goodbye_and_exits_non_zero(caplog: pytest.LogCaptureFixture):
    worker, dealer, model = make_worker([[pack(WELCOME)], [pack(SUBMIT)], [], []])
    model.failure = RuntimeError("broken kernel")
    with pytest.raises(SystemExit) as caught:
        worker.run()
    assert caught.value.code == 1
    assert isinstance(dealer.sent[-1], Goodbye)
    assert "broken kernel" in caplog.text


def test_a_refusal_ends_the_loop_with_its_reason():
    worker, dealer, _ = make_worker([[pack(Refused("other model"))]])
    with pytest.raises(ConfigError, match="other model"):
        worker.run()
    assert dealer.closed


def test_garbage_is_dropped_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture):
    garbage: list[list[Buffer]] = [[b"\xff\xff"], [b""], pack(Stats(1))]
    worker, dealer, _ = make_worker([[pack(WELCOME), *garbage, pack(SUBMIT)], [], []])
    with pytest.raises(ScriptEnded):
        worker.run()
    assert any(isinstance(message, Output) for message in dealer.sent)
    assert caplog.text.count("dropped a message") == 3
