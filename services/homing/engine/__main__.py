"""`python -m homing.engine`: one engine process."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import tyro

from homing.engine.config import EngineConfig
from homing.observe import configure_logging, run_main, watch_lifeline

if TYPE_CHECKING:
    from homing.engine.worker import Worker

log = logging.getLogger("homing.engine")


def main() -> None:
    config = tyro.cli(
        EngineConfig,
        prog="homing engine",
        description="Load a model, join a coordinator and answer requests.",
    )
    configure_logging(
        "engine" if config.rank is None else f"engine-{config.rank}", verbose=config.verbose
    )
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    if config.lifeline_fd is not None:
        watch_lifeline(config.lifeline_fd, lambda: os.kill(os.getpid(), signal.SIGINT))
    for name, value in config.openmp.items():
        config.environ.setdefault(name, value)
    serve(config)


def serve(config: EngineConfig) -> None:
    # What is imported and loaded stays until the end: no collection need look at all of it, neither
    # now, while it grows, nor amid answers.
    gc.disable()
    # torch is imported here: it reads OpenMP's settings when it is loaded, and --help is quick.
    from homing.engine.session import EngineSession
    from homing.engine.startup import load_engine
    from homing.engine.worker import Worker
    from homing.transport import Dealer, peer_identity, read_keys
    from homing.wire import Role

    gc.freeze()  # what was imported: the collection below looks only for what loading left
    keys = read_keys(config.keys, Role.ENGINE.value) if config.keys else None
    engine, card = load_engine(config)
    gc.collect()
    gc.freeze()
    gc.enable()
    uid = secrets.randbits(63)
    session = EngineSession(
        engine, card, uid=uid, rank=config.rank, join_timeout_s=config.join_timeout_s
    )
    dealer = Dealer(config.coordinator, peer_identity(Role.ENGINE.value, uid), keys)
    worker = Worker(engine, session, dealer)
    signal.signal(signal.SIGTERM, lambda *_: _leave(worker, config.drain_s))
    try:
        worker.run()
    finally:
        engine.close()


def _leave(worker: Worker, drain_s: float) -> None:
    """Finish what is running; a second signal does not wait for that."""
    log.info("leaving", extra={"drain_s": drain_s})
    signal.signal(signal.SIGTERM, _stop)
    worker.leave(drain_s)


def _stop(signum: int, frame: FrameType | None) -> None:
    """End the loop where it stands. It says Goodbye; clients submit elsewhere what was running."""
    log.info("stopping", extra={"signal": signal.Signals(signum).name})
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(run_main(main, program="homing engine"))
