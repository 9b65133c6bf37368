"""Logs: one line an event, on stderr, for people and for `grep` alike.

    2026-01-31 12:00:00.123 INFO  engine-0 prompt refused request_id=7 num_tokens=9000

What a caller passes as `extra=` follows the message as key=value.
"""

from __future__ import annotations

import json
import logging
import sys
import time

# What every record has; whatever else it has came by `extra=`.
_STANDARD_ATTRIBUTES = {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "taskName"}


def configure_logging(process_name: str, *, verbose: bool = False) -> None:
    """Send this process's logs to stderr, each line naming `process_name`, such as `engine-0`.

    Homing's own start at INFO (`verbose`: DEBUG), other libraries' at WARNING. A second call
    replaces the first.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process_name))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("homing").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)


class LineFormatter(logging.Formatter):
    """One line a record. Only a traceback adds lines, each indented."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [
            f"{seconds}.{int(record.msecs):03d}",
            f"{record.levelname:<7}",
            self._process_name,
            _one_line(record.getMessage()),
        ]
        parts += [
            f"{key}={_as_value(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD_ATTRIBUTES
        ]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + _indented(self.formatException(record.exc_info))
        return line


def _one_line(text: str) -> str:
    # What a peer or a client sent may be in the text: it must not look like a line of ours.
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _as_value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
