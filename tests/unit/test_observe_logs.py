from __future__ import annotations

import logging
import sys

import pytest

from homing.observe.logs import LineFormatter


def formatted(message: str, *args: object, extra: dict[str, object] | None = None) -> str:
    logger = logging.Logger("homing.test")
    record = logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, message, args, None, extra=extra
    )
    return LineFormatter("engine-0").format(record)


def test_a_line_has_time_level_process_message_and_values() -> None:
    line = formatted("refused %d", 3, extra={"request_id": 7, "num_tokens": 9000})
    date, time, level, process, rest = line.split(maxsplit=4)
    assert (len(date), len(time)) == (10, 12)
    assert (level, process) == ("INFO", "engine-0")
    assert rest == "refused 3 request_id=7 num_tokens=9000"


def test_what_a_client_sent_cannot_look_like_another_line() -> None:
    line = formatted("bad name %s", "a\n2026 ERROR x", extra={"user": "b\nc d"})
    assert len(line.splitlines()) == 1
    assert line.endswith('bad name a\\n2026 ERROR x user="b\\nc d"')


def test_a_traceback_follows_its_line_indented() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("homing", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    first, *others = LineFormatter("coordinator").format(record).splitlines()
    assert first.endswith("coordinator failed")
    assert others
    assert all(line.startswith("    ") for line in others)


@pytest.mark.parametrize("value", ["", "two words", 'a"b c'])
def test_a_value_that_is_not_a_word_is_quoted(value: str) -> None:
    assert formatted("x", extra={"key": value}).partition("key=")[2].startswith('"')
