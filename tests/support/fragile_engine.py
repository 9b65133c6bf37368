"""`python -m tests.support.fragile_engine ADDRESS RANK`: an engine that dies of a poisonous prompt.

Every other prompt is answered at once with its first token.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys

from homing.transport import Dealer, peer_identity
from homing.wire import (
    PROTOCOL_VERSION,
    Delta,
    Finish,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Hello,
    Output,
    Role,
    Submit,
    pack,
    pack_payload,
    parse,
)
from tests.support.coordinator_fleet import CARD

POISON = (63).to_bytes(4, "little")


def main(address: str, rank: int) -> None:
    uid = secrets.randbits(63)
    dealer = Dealer(address, peer_identity(Role.ENGINE.value, uid))
    card = pack_payload(CARD)
    dealer.send(pack(Hello(PROTOCOL_VERSION, Role.ENGINE, uid, 0, rank, model_card=card)))
    while True:
        for frames in dealer.receive(0.1):
            message = parse(frames)
            if isinstance(message, Submit):
                prompt = bytes(message.prompt or b"")
                if prompt.startswith(POISON):
                    os.kill(os.getpid(), signal.SIGKILL)
                dealer.send(pack(answer(message, prompt[:4])))
        dealer.send(pack(Heartbeat(0)))


def answer(submit: Submit, token: bytes) -> Output:
    ids = submit.request_id, submit.attempt
    delta = Delta(*ids, token, finish=Finish(FinishReason.STOP))
    ended = FinishedRequest(*ids, FinishReason.STOP, 0, 1)
    return Output(submit.client, 1, 1, pack_payload([ended]), pack_payload([delta]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
