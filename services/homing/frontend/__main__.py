"""`python -m homing.frontend`: one HTTP frontend process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys

import tyro
import uvloop

from homing.client import Client
from homing.errors import ConfigError, Unavailable
from homing.frontend.access import AccessSettings, is_public
from homing.frontend.app import create_app
from homing.frontend.config import FrontendConfig, read_text
from homing.frontend.measures import Measures
from homing.frontend.server import TlsFiles, listen, serve_http
from homing.frontend.service import ModelSettings, Service
from homing.observe import configure_logging, run_main, watch_lifeline

log = logging.getLogger(__name__)

GIL_SWITCH_S = 0.0005
"""How long the event loop waits for a thread that works on a long prompt; Python's own 5 ms, again
and again, delayed other streams by 10 ms."""


def main() -> int:
    config = tyro.cli(
        FrontendConfig, prog="homing frontend", description="Serve the fleet's model over HTTP."
    )
    configure_logging("frontend", verbose=config.verbose)
    sys.setswitchinterval(GIL_SWITCH_S)
    # Texts are tokenized one at a time: to hand one to another thread would take a third longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.lifeline_fd is not None:
        watch_lifeline(config.lifeline_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config))
    return 0


async def _run(config: FrontendConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = _listener(config)
    access = AccessSettings(
        api_keys=config.read_api_keys(),
        admin_keys=config.read_admin_keys(),
        allowed_origins=config.allowed_origins,
        is_public=is_public(listener),
    )
    tls = None
    if config.certfile is not None and config.keyfile is not None:
        tls = TlsFiles(config.certfile, config.keyfile)
    measures = Measures()
    client = Client(
        config.coordinator,
        max_inflight=config.max_inflight,
        counters=measures.counters,
        keys=config.keys,
    )
    service = Service(client, _model_settings(config), measures)
    joining = asyncio.create_task(service.join(config.join_timeout_s))
    joining.add_done_callback(lambda task: _on_joined(task, stop))
    await serve_http(
        create_app(service, access),
        listener.detach(),
        stop=stop,
        drain_s=config.drain_s,
        end_requests=service.close,
        tls=tls,
    )
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    if not joining.cancelled() and (error := joining.exception()):
        raise ConfigError(str(error)) if isinstance(error, Unavailable) else error


def _listener(config: FrontendConfig) -> socket.socket:
    if config.fd is not None:
        return socket.socket(fileno=config.fd)
    listener = listen(config.host, config.port)
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    return listener


def _model_settings(config: FrontendConfig) -> ModelSettings:
    """Raises `ConfigError` if the chat template cannot be read."""
    chat_template = None
    if config.chat_template is not None:
        chat_template = read_text(config.chat_template, "the chat template")
    return ModelSettings(
        tokenizer_dir=config.tokenizer,
        names=config.served_model_name,
        chat_template=chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _on_joined(joining: asyncio.Task[None], stop: asyncio.Event) -> None:
    if joining.cancelled():
        return
    if joining.exception():
        stop.set()
        return
    # What was made by now stays. A full collection that looked at it would hold all streams up for
    # a tenth of a second.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(run_main(main, program="homing frontend"))
