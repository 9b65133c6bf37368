"""`python -m tests.support.silent_engine ADDRESS RANK`: an engine that joins and never answers."""

from __future__ import annotations

import secrets
import sys

from homing.transport import Dealer, peer_identity
from homing.wire import PROTOCOL_VERSION, Heartbeat, Hello, Rejoin, Role, pack, pack_payload, parse
from tests.support.coordinator_fleet import CARD


def main(address: str, rank: int) -> None:
    uid = secrets.randbits(63)
    incarnation = 0
    dealer = Dealer(address, peer_identity(Role.ENGINE.value, uid))
    card = pack_payload(CARD)
    dealer.send(pack(Hello(PROTOCOL_VERSION, Role.ENGINE, uid, 0, rank, model_card=card)))
    while True:
        for frames in dealer.receive(0.1):
            if isinstance(parse(frames), Rejoin):
                incarnation += 1
                hello = Hello(
                    PROTOCOL_VERSION, Role.ENGINE, uid, incarnation, rank, model_card=card
                )
                dealer.send(pack(hello))
        dealer.send(pack(Heartbeat(incarnation)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
