"""How a process shows what it does, and how it learns that nobody needs it: logs, histograms, the
lifeline.

Knows nothing of requests, messages or models.
"""

from homing.observe.histogram import Histogram, read_histogram
from homing.observe.lifeline import watch_lifeline
from homing.observe.logs import configure_logging
from homing.observe.process import EXIT_CONFIG_ERROR, run_main

__all__ = [
    "EXIT_CONFIG_ERROR",
    "Histogram",
    "configure_logging",
    "read_histogram",
    "run_main",
    "watch_lifeline",
]
