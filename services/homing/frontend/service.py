"""What a frontend serves: the client to the fleet, and the model once there is one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from homing.client import Client
from homing.errors import ModelNotFound, Unavailable
from homing.frontend.measures import Measures
from homing.frontend.parsers import AnswerFormat
from homing.frontend.parsers import answer_format as answer_format_of
from homing.frontend.tokenizing import SHORT_BODY, TokenizerThread
from homing.frontend.tool_prompt import FORMAT_TOLD, knows_tools
from homing.tokenizer import Tokenizer
from homing.wire import ModelCard

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""For which requests wait while the process joins a fleet that may be serving."""

ANY_MODEL = ("", "EMPTY")
"""Names that clients give when they know none."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is told of the model instead of what its card and its files say."""

    tokenizer_dir: str | None = None
    names: tuple[str, ...] = ()
    chat_template: str | None = None
    """Jinja source."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model, with what is needed to talk to it."""

    card: ModelCard
    names: tuple[str, ...]
    """The names it answers to; the first is its own."""
    tokenizer: Tokenizer
    thread: TokenizerThread
    """For long prompts."""
    answer_format: AnswerFormat
    """How the model marks tool calls and thoughts."""
    since: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""

    async def prepare(self, body: bytes, job: Callable[[], T]) -> T:
        """What `job` makes of a request's body: at once of a short one, else in the thread. Raises
        what it raises, and `Overloaded`."""
        if len(body) <= SHORT_BODY:
            return job()
        return await self.thread.prepare(job)

    def answers_to(self, name: str | None) -> str:
        """The name to echo for the one that a request gives. Raises `ModelNotFound`."""
        if name is None or name in ANY_MODEL:
            return self.names[0]
        if name not in self.names:
            raise ModelNotFound(
                f"the model {name!r} is not served here; these are: {', '.join(self.names)}",
                field="model",
            )
        return name


class Service:
    """One frontend's share in the fleet. `join` runs in the background from the start on."""

    def __init__(
        self,
        client: Client,
        settings: ModelSettings | None = None,
        measures: Measures | None = None,
    ) -> None:
        self.client = client
        self.measures = measures or Measures()
        self._settings = settings or ModelSettings()
        self._model: ServedModel | None = None
        self._settled = asyncio.Event()

    @property
    def model(self) -> ServedModel:
        """Raises `Unavailable` until an engine has told what is served."""
        if self._model is None:
            raise Unavailable("no engine has joined yet")
        return self._model

    async def joined_model(self) -> ServedModel:
        """The model, for a request that a process just started may have been sent.

        A frontend that comes back has clients at its port before it has joined: they wait for it
        instead of being refused. Raises `Unavailable` like `model`.
        """
        if not self._settled.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), SETTLE_S)
        return self.model

    @property
    def model_name(self) -> str | None:
        """None until it is known."""
        return self._model.names[0] if self._model else None

    @property
    def unavailable(self) -> str | None:
        """Why requests cannot be served now; None if they can."""
        if not self.client.fleet.connected:
            return "the coordinator does not answer"
        if not self.client.fleet.live_ranks:
            return "no engine is serving"
        if self._model is None:
            return "the tokenizer is being read"
        return None

    async def join(self, timeout_s: float) -> None:
        """Join the fleet and learn its model, however long its first engine takes to load.

        Raises `Unavailable` when no coordinator answers in time, `ConfigError` when it refuses or
        when the tokenizer cannot be read.
        """
        try:
            await self.client.start(timeout_s)
            if self.client.fleet.card is None:
                self._settled.set()
            log.info("joined the coordinator; waiting for the first engine")
            card = await self._wait_for_card()
            self._model = await asyncio.to_thread(_read_model, card, self._settings)
        finally:
            self._settled.set()
        log.info("serving %s", ", ".join(self._model.names))

    async def _wait_for_card(self) -> ModelCard:
        while True:
            try:
                return await self.client.wait_for_model(60.0)
            except Unavailable:
                log.info("still waiting for the first engine")

    async def close(self) -> None:
        """Leave the fleet. What is still running is aborted."""
        await self.client.close()
        if self._model is not None:
            self._model.thread.close()


def _read_model(card: ModelCard, settings: ModelSettings) -> ServedModel:
    directory = Path(settings.tokenizer_dir or card.tokenizer_dir)
    tokenizer = Tokenizer.from_dir(directory, chat_template=settings.chat_template)
    tokenizer.warm_up()
    tool_call_parser = settings.tool_call_parser
    if tool_call_parser is None and not knows_tools(tokenizer.chat_template):
        tool_call_parser = FORMAT_TOLD
    answer_format = answer_format_of(
        tokenizer.chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    names = settings.names or (card.name,)
    return ServedModel(card, names, tokenizer, TokenizerThread(), answer_format)
