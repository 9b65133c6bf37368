"""The bytes of every token, as the grammar library wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from homing.tokenizer import Tokenizer  # not for `screening`, which is to stay small


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        """Masks need no text to be encoded; the library wants to be able to."""
        return [self.tokens.index(bytes([byte])) for byte in text]


def model_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """Takes half a second at 49,152 tokens.

    vocab_size: of the model; its padding, which the tokenizer does not know, is never allowed.
    eos_token_ids: allowed where an answer may end; one at least.
    """
    tokens = [tokenizer.token_bytes(token) or b"" for token in range(vocab_size)]
    # Control tokens are no text, whatever their spelling: no grammar may come by them.
    controls = {token for token in range(vocab_size) if not tokenizer.to_bytes([token])}
    return _library_tokenizer(tokens, sorted(controls.union(eos_token_ids)), eos_token_ids)


def byte_vocabulary() -> LLTokenizer:
    """One token for each byte: enough to compile a grammar, and made in no time."""
    return _library_tokenizer([bytes([byte]) for byte in range(256)] + [b"<eos>"], [256], [256])


def _library_tokenizer(
    tokens: list[bytes], special_token_ids: list[int], eos_token_ids: Sequence[int]
) -> LLTokenizer:
    wrapper = TokenizerWrapper(_Tokens(tokens, special_token_ids, eos_token_ids[0]))
    return LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=list(eos_token_ids))
