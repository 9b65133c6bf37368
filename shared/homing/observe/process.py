"""How a process's `main` ends: the exit code tells its supervisor whether to try again."""

from __future__ import annotations

import sys
from collections.abc import Callable

from homing.errors import ConfigError, HomingError

# The settings cannot work: a restart would fail the same way. argparse and tyro use it too.
EXIT_CONFIG_ERROR = 2


def run_main(main: Callable[[], int | None], *, program: str = "homing") -> int:
    """Run `main`; what Homing raises on purpose is one line on stderr, with no traceback.

    The exit code is then EXIT_CONFIG_ERROR for a ConfigError and 1 for the others.
    """
    try:
        return main() or 0
    except HomingError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG_ERROR if isinstance(error, ConfigError) else 1
