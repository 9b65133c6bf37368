"""FleetWeights: which epoch of weights the fleet has, and how a rank with older ones gets them.

An update is carried out in two phases, so that all ranks take the new weights or none does:

    PREPARE on every rank --all can--> COMMIT: the fleet's epoch moves, with every rank's
                          --one cannot--> ROLLBACK: as if nothing had been asked

A rank that joins later loads what the others were updated from, if that is still there: the last
whole update and the partial ones after it. Weights that came from memory are nowhere to be loaded
from: such a rank waits for the next whole update.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from homing.errors import NotAllowed, WireError
from homing.wire import (
    Payload,
    SetEpoch,
    UpdatePhase,
    UpdateWeights,
    WeightSource,
    pack_payload,
    read_payload,
)

MAX_PARTIAL_UPDATES = 16
"""As many are worth repeating for a rank that joins."""

MAX_EPOCH = 2**53
"""What anybody may claim: far from the largest number on the wire."""


class FleetWeights:
    def __init__(self) -> None:
        self.epoch = 0
        self._updates: list[UpdateWeights] | None = []
        """What leads from the weights that ranks start with to the fleet's; None: nothing does."""

    def checked_update(self, arguments: Payload) -> UpdateWeights:
        """The update that a client asks for, its epochs filled in. Raises NotAllowed."""
        update = _read(arguments, UpdateWeights)
        epoch = self.epoch + 1 if update.epoch is None else update.epoch
        if not self.epoch < epoch <= MAX_EPOCH:
            raise NotAllowed(
                f"epochs only increase: the fleet's is {self.epoch}, not below {epoch}"
            )
        return replace(update, epoch=epoch, base_epoch=self.epoch, phase=UpdatePhase.PREPARE)

    def checked_epoch(self, arguments: Payload) -> int:
        """The epoch that a client sets. Raises NotAllowed."""
        epoch = _read(arguments, SetEpoch).epoch
        if not self.epoch <= epoch <= MAX_EPOCH:
            raise NotAllowed(f"epochs only increase: the fleet's is {self.epoch}, asked is {epoch}")
        return epoch

    def committed(self, update: UpdateWeights) -> None:
        assert update.epoch is not None
        self.epoch = update.epoch
        known = self._updates if update.partial else []
        if update.source is WeightSource.DIRECTORY and known is not None:
            self._updates = [*known, update] if len(known) <= MAX_PARTIAL_UPDATES else None
        else:
            self._updates = None

    def adopt(self, epoch: int, update: Payload) -> bool:
        """A rank joins with a later epoch than this coordinator knows of, and tells where its
        weights are from. Returns whether it is later."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        try:
            self._updates = [read_payload(update or b"", UpdateWeights)]
        except WireError:
            self._updates = None
        return True

    def steps_from(self, epoch: int) -> list[tuple[UpdateWeights | SetEpoch, int]]:
        """What a rank at `epoch` must be told, one command after the other, and at which epoch each
        leaves it. Empty: nothing helps but the next update."""
        if self._updates is None:
            return []
        steps: list[tuple[UpdateWeights | SetEpoch, int]] = []
        for update in self._updates:
            assert update.epoch is not None
            if update.epoch > epoch:
                applied = replace(update, phase=UpdatePhase.APPLY, base_epoch=epoch)
                steps.append((applied, update.epoch))
                epoch = update.epoch
        if epoch < self.epoch:
            steps.append((SetEpoch(epoch=self.epoch), self.epoch))
        return steps


def packed(update: UpdateWeights, phase: UpdatePhase) -> bytes:
    return pack_payload(replace(update, phase=phase))


T = TypeVar("T")


def _read(arguments: Payload, kind: type[T]) -> T:
    try:
        return read_payload(arguments or b"\x80", kind)
    except WireError as error:
        raise NotAllowed(f"the arguments are not those of the command: {error}") from None
