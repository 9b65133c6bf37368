"""A child's lifeline: a pipe from its parent, whose end says that the parent has died.

The kernel closes the parent's end however it dies, SIGKILL included, so no child needs to ask.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# A child that has not stopped by then hangs: nobody is left to kill it.
GRACE_S = 3.0


def watch_lifeline(fd: int, on_parent_death: Callable[[], None] | None = None) -> None:
    """Stop this process once the write end of the pipe `fd` is closed; takes over `fd`.

    `on_parent_death` is called in a thread of its own; without it the process gets SIGTERM, as if
    its parent had said good-bye. Either has GRACE_S seconds, then the process exits at once.
    """
    os.set_inheritable(fd, False)
    stop = on_parent_death or _terminate_self
    threading.Thread(target=_watch, args=(fd, stop), name="lifeline", daemon=True).start()


def _watch(fd: int, stop: Callable[[], None]) -> None:
    while os.read(fd, 1):
        pass
    logger.warning("the parent process has died: stopping")
    stop()
    time.sleep(GRACE_S)
    os._exit(1)


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
