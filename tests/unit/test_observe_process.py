"""What each of Homing's processes begins with."""

from __future__ import annotations

import subprocess
import sys

SHOW_LIMIT = """
import resource
from homing.observe import run_main
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
run_main(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)))
"""


def test_a_process_may_have_as_many_connections_as_the_system_lets_it():
    """Systems let a process have 1,024 open files unless it asks: too few for a frontend."""
    command = [sys.executable, "-c", SHOW_LIMIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
