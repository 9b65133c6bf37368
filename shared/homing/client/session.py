"""Session: a client's standing with the coordinator, whatever happens to either.

Says Hello and, from then on, shows that it is alive; says Hello again when told Rejoin, which an
unknown sender is told: the coordinator was restarted, or gave this client up. Keeps the view of
the fleet. Pairs questions (control, stats) with their answers. Knows nothing of requests: what
concerns them goes to its owner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from msgspec import Struct
from typing_extensions import Buffer

from homing.client.fleet import FleetView
from homing.errors import (
    CommandFailed,
    ConfigError,
    HomingError,
    NotAllowed,
    Unavailable,
    WireError,
)
from homing.transport import AsyncDealer, Keys, peer_identity
from homing.wire import (
    PROTOCOL_VERSION,
    AbortMatched,
    AbortMatching,
    Command,
    Control,
    ControlDone,
    Drain,
    Drained,
    Fleet,
    Goodbye,
    Heartbeat,
    Hello,
    Lost,
    Message,
    Output,
    Refused,
    Rejoin,
    Role,
    Stats,
    StatsReply,
    Welcome,
    pack,
    pack_payload,
    parse,
    read_payload,
)

log = logging.getLogger(__name__)

HELLO_RETRY_S = 1.0
RANKS_RETURN_S = 10.0
"""In which the ranks rejoin a coordinator that was restarted, if they are there at all."""
DRAIN_GRACE_S = 10.0
"""Beyond its time, for a rank that drains to end its step and say Goodbye."""
SILENCE_S = 5.0
"""After this long without a word, the coordinator counts as away."""


class Session:
    """One process's session. `uid` names it for as long as it lives."""

    def __init__(
        self,
        address: str,
        *,
        on_request_message: Callable[[Output | Lost], None],
        on_fleet: Callable[[], None],
        on_rejoined: Callable[[], None],
        on_failure: Callable[[HomingError], None],
        counters: Callable[[], Mapping[str, float]],
        keys: Keys | None,
    ) -> None:
        """
        on_request_message: an Output or Lost came.
        on_fleet: `fleet` changed.
        on_rejoined: `fleet` is that of a new session; what ran for this client in the old one is
        gone.
        on_failure: the coordinator refuses this client for good.
        counters: what this process counted since it started.
        """
        self.uid = secrets.randbits(63)
        self.fleet = FleetView()
        self._address = address
        self._keys = keys
        self._on_request_message = on_request_message
        self._on_fleet = on_fleet
        self._on_rejoined = on_rejoined
        self._on_failure = on_failure
        self._counters = counters
        self._incarnation = 0
        self.welcomed = False
        """What is sent before that belongs to a session that is over, or not begun."""
        self._rejoined_at = -inf
        self._heartbeat_s = HELLO_RETRY_S
        self._last_heard = 0.0
        self._failure: HomingError | None = None
        self._changed = asyncio.Event()
        self._sequence = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}  # sequence of the question -> its answer
        self._dealer: AsyncDealer | None = None
        self._beating: asyncio.Task[None] | None = None

    # Life

    async def start(self, timeout_s: float) -> None:
        """Join; raises `Unavailable` when no coordinator answers in time, `ConfigError` when
        refused, and is closed then."""
        self._loop = asyncio.get_running_loop()
        identity = peer_identity(Role.CLIENT.value, self.uid)
        self._dealer = AsyncDealer(
            self._address, identity, self._on_frames, self._on_lost_connection, self._keys
        )
        self._say_hello()
        self._beating = asyncio.create_task(self._beat(), name="homing-client-heartbeat")
        missing = f"no coordinator answers at {self._address}"
        try:
            await self.until(lambda: self.fleet.connected, timeout_s, missing)
        except BaseException:
            self.close()
            raise

    async def until(self, holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        """Wait for a view of the fleet that `holds`; after `timeout_s` raise `Unavailable`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._failure:
                        raise self._failure
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"{otherwise} after {timeout_s:g} s") from None

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._dealer is None or self._beating is None:
            return
        self._beating.cancel()
        self._say_alive()
        self.send(Goodbye())
        self._fail_answers("the client was closed: its process is shutting down")
        self._dealer.close(linger_s=1.0)
        self._dealer = None
        self.fleet = replace(self.fleet, connected=False)

    def call_soon(self, action: Callable[[], None]) -> None:
        """After what has come from the coordinator by now."""
        self._loop.call_soon(action)

    def now(self) -> float:
        """The clock of the session's event loop."""
        return self._loop.time()

    @property
    def silence_s(self) -> float:
        """Seconds since the coordinator's last word."""
        return self._loop.time() - self._last_heard

    @property
    def awaits_ranks(self) -> bool:
        """The coordinator was met anew, and the ranks that it should have are yet to come."""
        lately = self._loop.time() - self._rejoined_at < RANKS_RETURN_S
        return lately and not self.fleet.live_ranks

    def send(self, message: Message) -> None:
        """Queue a message; a closed session drops it."""
        if self._dealer is not None:
            self._dealer.send(pack(message))

    # Questions

    async def control(
        self, command: Command, arguments: Struct | dict[str, Any] | None, timeout_s: float
    ) -> dict[int, dict[str, Any]]:
        frame = None if arguments is None else pack_payload(arguments)
        return await self._ask(lambda n: Control(command, n, frame), timeout_s)

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        return await self._ask(lambda n: Stats(n), timeout_s)

    async def drain(self, rank: int, timeout_s: float) -> None:
        await self._ask(lambda n: Drain(n, rank, timeout_s), timeout_s + DRAIN_GRACE_S)

    async def abort_matching(self, external_digest: int | None, timeout_s: float) -> int:
        return await self._ask(lambda n: AbortMatching(n, external_digest), timeout_s)

    async def _ask(self, question: Callable[[int], Message], timeout_s: float) -> Any:
        if not self.fleet.connected:
            raise Unavailable("the coordinator does not answer")
        sequence = next(self._sequence)
        answer = self._answers[sequence] = self._loop.create_future()
        try:
            self.send(question(sequence))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the fleet did not answer within {timeout_s:g} s") from None
        finally:
            del self._answers[sequence]

    def _answer(self, sequence: int, result: Any) -> None:
        future = self._answers.get(sequence)
        if future is None or future.done():
            return
        if isinstance(result, HomingError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _fail_answers(self, reason: str) -> None:
        for sequence in list(self._answers):
            self._answer(sequence, Unavailable(reason))

    # What comes in

    def _on_frames(self, frames: list[Buffer]) -> None:
        self._last_heard = self._loop.time()
        try:
            self._on_message(parse(frames))
        except WireError as error:
            log.warning("dropped a message from the coordinator: %s", error)

    def _on_message(self, message: Message) -> None:
        match message:
            case Output() | Lost():
                self._on_request_message(message)
            case Heartbeat():
                if self.welcomed and not self.fleet.connected:
                    self._set_fleet(replace(self.fleet, connected=True))
            case Fleet():
                self._set_fleet(self.fleet.updated(message))
            case Welcome():
                self._on_welcome(message)
            case ControlDone():
                result = read_payload(message.results or b"\x80", dict[int, dict[str, Any]])
                self._answer(message.sequence, result if message.ok else _failure(message, result))
            case StatsReply():
                self._answer(
                    message.token, read_payload(message.snapshot or b"\x80", dict[str, Any])
                )
            case Drained():
                self._answer(message.token, None if message.ok else NotAllowed(message.detail))
            case AbortMatched():
                self._answer(message.token, message.num_requests)
            case Rejoin():
                self._begin_anew("the coordinator was restarted")
            case Refused():
                self._failure = ConfigError(f"the coordinator refuses: {message.reason}")
                self._on_failure(self._failure)
                self._changed.set()
            case _:
                raise WireError(f"{type(message).__name__} is not for a client")

    def _on_welcome(self, message: Welcome) -> None:
        again = not self.welcomed and self._incarnation > 0
        self.welcomed = True
        self._heartbeat_s = message.heartbeat_s
        if again:
            self._rejoined_at = self._loop.time()
            log.info("rejoined the coordinator")
        self._set_fleet(self.fleet.updated(message), self._on_rejoined if again else None)

    def _on_lost_connection(self) -> None:
        log.info("the connection to the coordinator broke")
        self._begin_anew("the connection to the coordinator broke")

    def _begin_anew(self, why: str) -> None:
        # One Hello for a burst of Rejoins: an unknown sender is told so for each message it sent.
        if self.welcomed:
            self.welcomed = False
            self._incarnation += 1
            self._fail_answers(why)
            self._say_hello()

    def _set_fleet(self, fleet: FleetView, tell: Callable[[], None] | None = None) -> None:
        self.fleet = fleet
        self._changed.set()
        (tell or self._on_fleet)()

    # What goes out by itself

    def _say_hello(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, Role.CLIENT, self.uid, self._incarnation))

    def _say_alive(self) -> None:
        self.send(Heartbeat(self._incarnation, counters=pack_payload(self._counters())))

    async def _beat(self) -> None:
        """Show that this side is alive, and notice when the other is not."""
        self._last_heard = self._loop.time()
        while True:
            await asyncio.sleep(self._heartbeat_s if self.welcomed else HELLO_RETRY_S)
            if self.welcomed:
                self._say_alive()
            else:
                self._say_hello()
            if self.silence_s > SILENCE_S and self.fleet.connected:
                log.warning("the coordinator has been silent for %.1f s", self.silence_s)
                self._set_fleet(replace(self.fleet, connected=False))
            self._on_fleet()  # lets the owner look at its deadlines


def _failure(done: ControlDone, results: dict[int, dict[str, Any]]) -> HomingError:
    """A command that no rank was told is not allowed; else some rank could not carry it out."""
    if not results:
        return NotAllowed(done.detail)
    causes = [f"rank {rank}: {r['error']}" for rank, r in sorted(results.items()) if "error" in r]
    return CommandFailed("; ".join(causes) or done.detail)
