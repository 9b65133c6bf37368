"""How a process shows what it does, and how it learns that nobody needs it: logs and the lifeline.

Knows nothing of requests, messages or models.
"""

from homing.observe.lifeline import watch_lifeline
from homing.observe.logs import configure_logging
from homing.observe.process import EXIT_CONFIG_ERROR, run_main

__all__ = ["EXIT_CONFIG_ERROR", "configure_logging", "run_main", "watch_lifeline"]
