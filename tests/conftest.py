"""What every test process needs before anything else is imported."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# OpenMP threads that wait must not spin: tests run many processes on few cores, and one that spins
# takes the core from the one it waits for. Read when torch loads, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, and no judgement by the clock: a busy machine is no fault.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
