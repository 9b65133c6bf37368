"""What every test process needs before anything else is imported."""

from __future__ import annotations

import os

# OpenMP threads that wait must not spin: tests run many processes on few cores, and one that spins
# takes the core from the one it waits for. Read when torch loads, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
