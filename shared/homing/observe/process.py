"""How a process's `main` ends: the exit code tells its supervisor whether to try again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from homing.errors import ConfigError

# The settings cannot work: a restart would fail the same way. argparse and tyro use it too.
EXIT_CONFIG_ERROR = 2


def run_main(main: Callable[[], int | None], *, program: str = "homing") -> int:
    """Run `main`; a ConfigError is one line on stderr and EXIT_CONFIG_ERROR, with no traceback."""
    try:
        return main() or 0
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG_ERROR
