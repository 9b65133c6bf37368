"""`python -m homing.frontend`: one HTTP frontend process."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import tyro
import uvloop

from homing.client import Client
from homing.errors import ConfigError, Unavailable
from homing.frontend.app import create_app
from homing.frontend.config import FrontendConfig
from homing.frontend.server import listen, serve_http
from homing.frontend.service import ModelSettings, Service
from homing.observe import configure_logging, run_main, watch_lifeline

log = logging.getLogger(__name__)


def main() -> int:
    config = tyro.cli(
        FrontendConfig, prog="homing frontend", description="Serve the fleet's model over HTTP."
    )
    configure_logging("frontend", verbose=config.verbose)
    if config.lifeline_fd is not None:
        watch_lifeline(config.lifeline_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config))
    return 0


async def _run(config: FrontendConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fd = config.fd
    if fd is None:
        listener = listen(config.host, config.port)
        log.info("listening on %s:%d", *listener.getsockname()[:2])
        fd = listener.detach()
    client = Client(config.coordinator, max_inflight=config.max_inflight)
    service = Service(client, _model_settings(config))
    joining = asyncio.create_task(service.join(config.join_timeout_s))
    joining.add_done_callback(lambda task: _stop_if_failed(task, stop))
    app = create_app(service)
    await serve_http(app, fd, stop=stop, drain_s=config.drain_s, end_requests=service.close)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    if not joining.cancelled() and (error := joining.exception()):
        raise ConfigError(str(error)) if isinstance(error, Unavailable) else error


def _model_settings(config: FrontendConfig) -> ModelSettings:
    """Raises `ConfigError` if the chat template cannot be read."""
    chat_template = None
    if config.chat_template is not None:
        try:
            chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error
    return ModelSettings(
        tokenizer_dir=config.tokenizer,
        names=config.served_model_name,
        chat_template=chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _stop_if_failed(joining: asyncio.Task[None], stop: asyncio.Event) -> None:
    if not joining.cancelled() and joining.exception():
        stop.set()


if __name__ == "__main__":
    sys.exit(run_main(main, program="homing frontend"))
