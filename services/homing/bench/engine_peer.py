"""An engine of a bench, which computes nothing: how it joins the coordinator."""

from __future__ import annotations

import secrets

from homing.transport import Dealer, peer_identity
from homing.wire import PROTOCOL_VERSION, Hello, ModelCard, Role, pack, pack_payload

BLOCK_SIZE = 16
HEARTBEAT_S = 0.5


def join_as_engine(address: str, rank: int, *, tokenizer_dir: str = "") -> Dealer:
    """A connection on which Hello was said, for a model that takes any prompt of a bench."""
    uid = secrets.randbits(63)
    dealer = Dealer(address, peer_identity(Role.ENGINE.value, uid))
    card = ModelCard(
        name="bench",
        tokenizer_dir=tokenizer_dir,
        max_context_tokens=2**20,
        vocab_size=2**17,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
    )
    dealer.send(
        pack(Hello(PROTOCOL_VERSION, Role.ENGINE, uid, 0, rank, model_card=pack_payload(card)))
    )
    return dealer
