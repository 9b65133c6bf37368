"""What a client knows of the fleet, and how it follows the coordinator's word."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from homing.prefix import prefix_salt, routing_hashes
from homing.wire import Fleet, FleetState, ModelCard, Payload, RankInfo, Welcome, read_payload


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot; the client replaces it when the coordinator says something new."""

    connected: bool = False
    """The coordinator answers."""
    state: FleetState = FleetState.RUNNING
    epoch: int = 0
    policy: str = ""
    reads_prefixes: bool = False
    live_ranks: int = 0
    ranks: list[RankInfo] = field(default_factory=list[RankInfo])
    """All ranks that ever joined this coordinator, the lost ones too."""
    card: ModelCard | None = None
    """None until the first engine has joined."""

    def updated(self, message: Welcome | Fleet) -> FleetView:
        """This view after a Welcome or Fleet. Raises `WireError` if its frames are not what they
        say."""
        return replace(
            self,
            connected=True,
            state=message.state,
            epoch=message.epoch,
            policy=message.policy,
            reads_prefixes=message.reads_prefixes,
            live_ranks=message.live_ranks,
            ranks=_read_or(message.ranks, list[RankInfo], self.ranks) or [],
            card=_read_or(message.model_card, ModelCard, self.card),
        )

    def routing_hashes(self, tokens: bytes, cache_salt: str) -> bytes | None:
        """The hashes at the prompt's routing points; None when the policy does not read them."""
        if not self.reads_prefixes or self.card is None:
            return None
        salt = prefix_salt(epoch=self.epoch, cache_salt=cache_salt)
        return routing_hashes(tokens, self.card.block_size, salt)


T = TypeVar("T")


def _read_or(frame: Payload, kind: type[T], unchanged: T | None) -> T | None:
    return unchanged if frame is None else read_payload(frame, kind)
