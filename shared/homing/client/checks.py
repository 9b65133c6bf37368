"""Whether a request can be served, before it is sent."""

from __future__ import annotations

from math import inf

from homing.errors import ContextLengthExceeded, InvalidRequest
from homing.params import SamplingParams
from homing.prefix import TOKEN_BYTES
from homing.wire import ModelCard

MAX_CACHE_SALT_CHARACTERS = 64


def check_urgency(priority: int, timeout_s: float | None) -> None:
    """Raise unless these can be sent."""
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"priority is {priority}; it must be a 32-bit integer", field="priority"
        )
    if timeout_s is not None and not 0 < timeout_s < inf:
        raise InvalidRequest(
            f"timeout_s is {timeout_s}; it must be more than 0 and finite", field="timeout_s"
        )


def check_request(
    prompt_tokens: bytes,
    params: SamplingParams,
    cache_salt: str,
    card: ModelCard,
    *,
    num_resumed_tokens: int = 0,
) -> int:
    """Raise unless the model can serve this; returns the most tokens that may be generated."""
    num_prompt_tokens, rest = divmod(len(prompt_tokens), TOKEN_BYTES)
    if rest or not num_prompt_tokens:
        raise InvalidRequest(
            f"the prompt has {len(prompt_tokens)} bytes; it must be uint32 tokens, at least one",
            field="prompt",
        )
    if len(cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt has {len(cache_salt)} characters; "
            f"the limit is {MAX_CACHE_SALT_CHARACTERS}",
            field="cache_salt",
        )
    if not 0 <= num_resumed_tokens < num_prompt_tokens:
        raise InvalidRequest(
            f"{num_resumed_tokens} of {num_prompt_tokens} tokens are resumed; "
            "at least one must be the prompt",
            field="num_resumed_tokens",
        )
    params.check_vocabulary(card.vocab_size)
    wanted = params.num_tokens_to_generate
    if wanted is not None and num_resumed_tokens:
        wanted -= num_resumed_tokens
        if wanted < 1:
            raise InvalidRequest(
                f"{num_resumed_tokens} tokens are resumed, and no more were to be generated",
                field="num_resumed_tokens",
            )
    room = card.max_context_tokens - num_prompt_tokens
    if room < (1 if wanted is None else wanted):
        asked = "" if wanted is None else f" and {wanted} to generate"
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens{asked}; "
            f"the model's maximum context length is {card.max_context_tokens} tokens",
            field="prompt",
        )
    return room if wanted is None else wanted
