"""How a process's `main` begins and ends: its exit code tells its supervisor what to do next."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import suppress

from homing.errors import ConfigError, HomingError

# The settings cannot work: a restart would fail the same way. argparse and tyro use it too.
EXIT_CONFIG_ERROR = 2


def run_main(main: Callable[[], int | None], *, program: str = "homing") -> int:
    """Run `main`, with as many open files as may be; what Homing raises on purpose is one line on
    stderr, with no traceback.

    The exit code is then EXIT_CONFIG_ERROR for a ConfigError and 1 for the others.
    """
    _raise_open_files_limit()
    try:
        return main() or 0
    except HomingError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG_ERROR if isinstance(error, ConfigError) else 1


def _raise_open_files_limit() -> None:
    """A connection is an open file, and systems usually give a process no more than 1,024 of those
    unless it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
