"""The last things that happened, for the error that says they should not have."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Protocol, TypeVar

from homing.errors import InternalError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class HasState(Protocol[S]):
    """Called by its `str` where an error tells of it."""

    state: S


class History:
    """A bounded log of events. Entries are tuples: they are formatted only when they are read."""

    def __init__(self, *, length: int = 200) -> None:
        self._entries: deque[tuple[object, ...]] = deque(maxlen=length)

    def recent(self, count: int = 20) -> list[str]:
        """The last `count` entries, oldest first."""
        return [" ".join(map(str, entry)) for entry in list(self._entries)[-count:]]

    def move(self, table: Mapping[tuple[S, E], S], who: HasState[S], event: E) -> None:
        """Into the state that the table gives, the event noted. A missing entry is a bug of ours:
        `InternalError`."""
        self._entries.append((who, event))
        try:
            who.state = table[who.state, event]
        except KeyError:
            raise InternalError(
                f"{who}: {event} in {who.state}; before that: {'; '.join(self.recent())}"
            ) from None
