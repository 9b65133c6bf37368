"""The engine's side of the protocol: messages from the coordinator in, messages to it out.

    JOINING  Hello was said, and is repeated until the coordinator answers
    JOINED   it said Welcome: requests come in, outputs and heartbeats go out

A session ends when the coordinator says Rejoin (it does not know this engine: it was restarted, or
gave the engine up) or is silent. Then all work is dropped, since its clients submit it again, and
the next session begins with another Hello. Knows nothing of sockets and has no clock: `now` comes
from the caller.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum
from typing import Any, assert_never

import numpy as np

from homing.engine.answers import Attempt, delta_of, finished_of, output_message
from homing.engine.commands import Commands
from homing.engine.engine import Engine, RequestOutput
from homing.errors import ConfigError, InvalidRequest, LoanGone, Overloaded, Unavailable
from homing.params import SamplingParams
from homing.prefix import TOKEN_BYTES
from homing.transport import borrow
from homing.wire import (
    PROTOCOL_VERSION,
    Abort,
    Control,
    ControlDone,
    Delta,
    Drain,
    Finish,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Hello,
    KvEvents,
    Message,
    ModelCard,
    Refused,
    Rejoin,
    Role,
    Submit,
    Welcome,
    pack_payload,
    request_name,
)
from homing.wire.messages import ToEngine

log = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 10.0
SILENCE_S = 10.0
"""A coordinator that was silent for so long is taken for dead: it shows itself every half second,
unless told otherwise."""


class SessionState(Enum):
    JOINING = "joining"
    JOINED = "joined"


class EngineSession:
    """Raises ConfigError when the coordinator refuses this engine, and Unavailable when none
    answers for `join_timeout_s`."""

    def __init__(
        self, engine: Engine, card: ModelCard, *, uid: int, rank: int | None, join_timeout_s: float
    ) -> None:
        self.state = SessionState.JOINING
        self.incarnation = 0
        self.next_tick = 0.0
        """When `tick` is due."""
        self._engine = engine
        self._card = pack_payload(card)
        self._uid = uid
        self._rank = rank
        self._join_timeout_s = join_timeout_s
        self._attempt_of: dict[tuple[int, int], int] = {}  # (client, request id) -> attempt running
        self._commands = Commands(engine)
        self._retry_s = FIRST_RETRY_S
        self._heartbeat_s = FIRST_RETRY_S
        self._reads_prefixes = False
        self._leave_by = math.inf
        self._joining_since = 0.0
        self._last_heard = 0.0

    # Joining, and noticing that the session has ended

    def start(self, now: float) -> list[Message]:
        """Begin the first session, or the next."""
        self.state = SessionState.JOINING
        self._joining_since = now
        self._retry_s = FIRST_RETRY_S
        return self._say_hello(now)

    def tick(self, now: float) -> list[Message]:
        """What is due by now."""
        if now < self.next_tick:
            return []
        if self.state is SessionState.JOINING:
            waited_s = now - self._joining_since
            if waited_s > self._join_timeout_s:
                raise Unavailable(f"no coordinator answered in {waited_s:.0f} s")
            log.info("waiting for the coordinator", extra={"seconds": round(waited_s)})
            return self._say_hello(now)
        if now - self._last_heard > max(SILENCE_S, 2 * self._heartbeat_s):
            log.warning(
                "the coordinator is silent", extra={"seconds": round(now - self._last_heard)}
            )
            return self._rejoin(now)
        self.next_tick = now + self._heartbeat_s
        return [self._heartbeat(), *self._kv_events()]

    def _say_hello(self, now: float) -> list[Message]:
        self.next_tick = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
        hello = Hello(
            PROTOCOL_VERSION,
            Role.ENGINE,
            self._uid,
            self.incarnation,
            rank=self._rank,
            state=self._engine.lifecycle.state,
            epoch=self._engine.lifecycle.epoch,
            control_sequence=self._commands.sequence,
            model_card=self._card,
            weights=self._commands.weights_from,
        )
        return [hello]

    def lost_connection(self, now: float) -> list[Message]:
        """What was on its way is gone: the coordinator and this engine begin anew."""
        if self.state is SessionState.JOINING:
            return []
        log.warning("the connection to the coordinator broke")
        return self._rejoin(now)

    def _rejoin(self, now: float) -> list[Message]:
        """Drop all work, silently: whoever wanted it submits it again."""
        log.info("rejoining", extra={"dropped_requests": len(self._attempt_of)})
        self._attempt_of.clear()
        self._commands.drop()
        self._engine.abort_all()
        if journal := self._engine.block_pool.journal:
            journal.forget()
        self.incarnation += 1
        return self.start(now)

    # What comes in

    def handle(self, message: ToEngine, now: float) -> list[Message]:
        self._last_heard = now
        match message:
            case Welcome():
                return self._welcome(message, now)
            case Rejoin():
                # One new session for a burst of them: a stranger may be told once for each message.
                return self._rejoin(now) if self.state is SessionState.JOINED else []
            case Refused():
                raise ConfigError(f"the coordinator refuses this engine: {message.reason}")
            case Submit():
                return self._submit(message, now) if self.state is SessionState.JOINED else []
            case Abort():
                self._abort(message)
                return []
            case Control():
                if self.state is SessionState.JOINING:
                    return []  # it was for the session before
                return self._with_outputs(self._commands.take(message))
            case Drain():
                self._leave_by = min(self._leave_by, now + message.timeout_s)
                return []
            case Heartbeat():
                return []
            case _:
                assert_never(message)

    def _welcome(self, message: Welcome, now: float) -> list[Message]:
        """The fleet's state is not taken over here: the coordinator sends commands to reach it."""
        self.state = SessionState.JOINED
        self._commands.rank = message.rank
        self._reads_prefixes = message.reads_prefixes
        self._heartbeat_s = message.heartbeat_s
        self.next_tick = now + message.heartbeat_s
        log.info("joined the fleet", extra={"rank": message.rank, "incarnation": self.incarnation})
        if self.is_leaving:
            return [self._heartbeat(), Drain(0, None, max(0.0, self._leave_by - now))]
        return [self._heartbeat()]

    def _submit(self, message: Submit, now: float) -> list[Message]:
        """Take a request on, or answer at once why not. An attempt that is running, or older, is
        ignored; a newer one replaces it."""
        name = (message.client, message.request_id)
        running = self._attempt_of.get(name)
        if running is not None:
            if message.attempt <= running:
                return []
            self._engine.abort(Attempt(*name, running))
        self._attempt_of[name] = message.attempt
        key = Attempt(*name, message.attempt)
        log.debug("took on", extra=_names(key) | {"prompt_tokens": message.num_prompt_tokens})
        try:
            self._engine.add_request(
                key,
                _prompt(message),
                SamplingParams.from_bytes(message.sampling),
                num_resumed=message.num_resumed_tokens,
                max_new_tokens=message.max_new_tokens,
                cache_salt=message.cache_salt,
                priority=message.priority,
                deadline=None if message.deadline_s is None else now + message.deadline_s,
            )
        except (InvalidRequest, Overloaded, LoanGone) as error:
            field = error.field if isinstance(error, InvalidRequest) else None
            reason = FinishReason.UNREAD if isinstance(error, LoanGone) else FinishReason.ERROR
            finish = Finish(reason, detail=str(error), field=field or "")
            del self._attempt_of[name]
            delta = Delta(key.request_id, key.attempt, b"", finish=finish)
            ended = FinishedRequest(key.request_id, key.attempt, reason, 0, 0)
            return [output_message(key.client, [delta], [ended])]
        return []

    def may_join_a_step(self, message: ToEngine) -> bool:
        """It changes nothing that a running step works on."""
        if isinstance(message, Submit):
            return (message.client, message.request_id) not in self._attempt_of
        return isinstance(message, Heartbeat)

    def _abort(self, message: Abort) -> None:
        """The answer is among the next outputs. What has ended already has been answered."""
        if self._attempt_of.get((message.client, message.request_id)) == message.attempt:
            self._engine.abort(Attempt(message.client, message.request_id, message.attempt))

    def poll(self) -> list[Message]:
        """The answers to commands that took a while. To be asked for in every turn."""
        answers = self._commands.poll()
        return self._with_outputs(answers) if answers else []

    @property
    def is_stopping(self) -> bool:
        """The fleet was told to shut down: say what is left to be said, and end the process."""
        return self._commands.is_stopping

    # Leaving

    def leave(self, now: float, timeout_s: float) -> list[Message]:
        """Take no more requests, finish those that are there for so long, and be done."""
        self._leave_by = min(self._leave_by, now + timeout_s)
        return [Drain(0, None, timeout_s)] if self.state is SessionState.JOINED else []

    @property
    def is_leaving(self) -> bool:
        return self._leave_by < math.inf

    def may_go(self, now: float) -> bool:
        """It leaves and has nothing to finish, or no more time. What it has not finished goes on
        elsewhere, as does what is on its way here."""
        return self.is_leaving and (not self._attempt_of or now >= self._leave_by)

    # What goes out

    def _with_outputs(self, answers: list[ControlDone]) -> list[Message]:
        """Requests that a command ended are answered before the command is."""
        return [*self.outputs(self._engine.take_outputs()), *answers]

    def outputs(self, outputs: Iterable[RequestOutput]) -> list[Message]:
        """One message for each client that a step brought something for."""
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        finished: defaultdict[int, list[FinishedRequest]] = defaultdict(list)
        for output in outputs:
            key = output.request.key
            assert isinstance(key, Attempt)
            if self._attempt_of.get((key.client, key.request_id)) != key.attempt:
                continue  # replaced by a newer attempt, or dropped
            deltas[key.client].append(delta_of(key, output))
            if output.finish:
                del self._attempt_of[key.client, key.request_id]
                finished[key.client].append(finished_of(key, output))
                log.debug("finished", extra=_names(key) | {"reason": output.finish.reason.value})
        return [output_message(client, deltas[client], finished[client]) for client in deltas]

    def _heartbeat(self) -> Heartbeat:
        stats = self._engine.stats
        return Heartbeat(
            self.incarnation,
            running=stats.running,
            waiting=stats.waiting,
            owed_tokens=stats.owed_tokens,
            kv_used_blocks=stats.kv_used_blocks,
            kv_total_blocks=stats.kv_total_blocks,
            state=self._engine.lifecycle.state,
            epoch=self._engine.lifecycle.epoch,
            counters=pack_payload(
                dataclasses.asdict(self._engine.counters) | self._engine.queue_time.counters()
            ),
        )

    def _kv_events(self) -> list[KvEvents]:
        """What corrects the coordinator's guess, where it has one."""
        journal = self._engine.block_pool.journal
        events = journal.take() if journal and self._reads_prefixes else None
        return [events] if events else []


def _names(key: Attempt) -> dict[str, Any]:
    return {"request": request_name(key.client, key.request_id), "attempt": key.attempt}


def _prompt(message: Submit) -> np.ndarray:
    data: Any = b"" if message.prompt is None else message.prompt
    if message.lent_at is not None:
        data = borrow(message.lent_at, message.num_prompt_tokens * TOKEN_BYTES)
    try:
        tokens = np.frombuffer(data, "<u4")
    except ValueError:
        raise InvalidRequest("the prompt is not an array of uint32", field="prompt") from None
    if len(tokens) != message.num_prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens; {message.num_prompt_tokens} were announced",
            field="prompt",
        )
    return tokens
