"""`python -m homing.coordinator`: one coordinator process."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

import tyro

from homing.coordinator.config import CoordinatorConfig
from homing.coordinator.memory import keep_large_buffers
from homing.coordinator.server import Server
from homing.observe import configure_logging, run_main, watch_lifeline

log = logging.getLogger("homing.coordinator")


def main() -> None:
    config = tyro.cli(
        CoordinatorConfig, prog="homing coordinator", description="Route requests to engines."
    )
    configure_logging("coordinator", verbose=config.verbose)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    if config.lifeline_fd is not None:
        watch_lifeline(config.lifeline_fd)
    keep_large_buffers()
    server = Server(config)
    try:
        server.run()
    finally:
        server.close()


def _stop(signum: int, frame: FrameType | None) -> None:
    """End the loop where it stands: nothing needs to be saved, and peers outlive a coordinator."""
    log.info("stopping", extra={"signal": signal.Signals(signum).name})
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run_main(main, program="homing coordinator"))
