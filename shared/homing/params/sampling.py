"""SamplingParams: how one request wants its tokens chosen and when they end.

Checked at construction, so a value that exists is a value that an engine can honour (what depends
on the model, such as a token id's upper bound, is checked by `check_vocabulary`). Crosses the
wire as a msgpack map of the fields that differ from their defaults.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from homing.errors import InvalidRequest
from homing.params.structured import StructuredOutput

MAX_TOP_LOGPROBS = 20
MAX_STOP_WORDS = 16
MAX_BAD_WORDS = 128
MAX_SEED = 2**63 - 1


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of one generation. Bad values raise `InvalidRequest`, a `ValueError`.

    Log-probabilities are those of the model itself: the log-softmax of the raw logits, in nats,
    before temperature, penalties, bias and truncation.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy: the highest logit, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 0.0
    """Keep the fewest tokens whose probability sums to p; 0 or 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable; 0 keeps all."""
    seed: int | None = None
    """Noise is keyed by (seed, position in the sequence): equal seeds give equal tokens on any
    rank and in any batch. None: the client draws one."""
    num_tokens_to_generate: int | None = None
    """Most tokens to generate; None: as many as the context holds. 0 scores the prompt only."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are barred until this many tokens are generated."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own. The stop id is the last token of the
    result, and is not part of the text."""
    stop_words: tuple[str, ...] = ()
    """Strings that end the answer when its text contains one."""
    detokenize_stop_sequence: bool = False
    """Keep the stop word that ended the answer in its text."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of each token that the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the answer holds it."""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit; -100 bars it."""
    return_log_probs: bool = False
    """Return the log-probability of each generated token, and of the prompt's unless skipped."""
    skip_prompt_log_probs: bool = True
    """With `return_log_probs`: leave the prompt's out. Asking for them gives up the prefix hit."""
    top_n_logprobs: int = 0
    """With `return_log_probs`: also the n most probable tokens at each position."""
    structured_output: StructuredOutput | None = None
    """The shape that the answer must have; None: any. It ends when nothing can follow, too. Where
    the other parameters leave no token that fits, they give way."""
    bad_words: tuple[str, ...] = ()
    """Strings that the answer must not hold: the last token of each is barred where those before it
    stand, with and without a space in front."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: all. Where `logit_bias`, `min_tokens` and
    `bad_words` leave none of them, they give way."""

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_k", self.top_k, 0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("top_n_logprobs", self.top_n_logprobs, 0, MAX_TOP_LOGPROBS)
        _in_range("min_tokens", self.min_tokens, 0, math.inf)
        if self.seed is not None:
            _in_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.num_tokens_to_generate is not None:
            _in_range("num_tokens_to_generate", self.num_tokens_to_generate, 0, math.inf)
            _in_range("min_tokens", self.min_tokens, 0, self.num_tokens_to_generate)
        if self.top_n_logprobs and not self.return_log_probs:
            raise InvalidRequest("top_n_logprobs needs return_log_probs", field="top_n_logprobs")
        _in_range(
            "the number of stop_words", len(self.stop_words), 0, MAX_STOP_WORDS, field="stop_words"
        )
        if any(not word for word in self.stop_words):
            raise InvalidRequest("stop_words holds an empty string", field="stop_words")
        _in_range(
            "the number of bad_words", len(self.bad_words), 0, MAX_BAD_WORDS, field="bad_words"
        )
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words holds an empty string", field="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty", field="allowed_token_ids")
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0, field="logit_bias")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def wants_prompt_log_probs(self) -> bool:
        return self.return_log_probs and not self.skip_prompt_log_probs

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id here is not in a vocabulary of this size."""
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, field) or ():
                _in_range(f"token id {token} in {field}", token, 0, vocab_size - 1, field=field)

    def to_bytes(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: Any) -> SamplingParams:
        """Read what `to_bytes` wrote (bytes-like); anything else raises `InvalidRequest`."""
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise InvalidRequest(f"sampling parameters: {error}", field="sampling") from error


def _in_range(
    name: str, value: float, low: float, high: float, *, field: str | None = None
) -> None:
    if not (low <= value <= high) or value in (math.inf, -math.inf):
        bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value}; it must be {bounds}", field=field or name)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
