"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts.

Tokens read as text, not as the vocabulary spells them; of a part of a character, as its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from msgspec import Struct

from homing.frontend.openai.blocks import BLOCK, blocks_of, encoded, joined, json_list
from homing.frontend.text import Token
from homing.tokenizer import Tokenizer

LOWEST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON cannot say. The value that vLLM uses."""


class CompletionLogProbs(Struct):
    """Four lists of one length, an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the prompt's first token, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogProb(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogProb(ChatTopLogProb):
    top_logprobs: list[ChatTopLogProb]


class ChatLogProbs(Struct):
    content: list[ChatTokenLogProb]
    refusal: None = None


class PromptLogProb(Struct):
    logprob: float
    rank: int | None
    """1 is the most probable; None if it is beyond the number asked for."""
    decoded_token: str


Spelling = Callable[[int], str]
"""How a token is named."""

PromptLogProbsList = list[dict[str, PromptLogProb] | None]


def finite(log_prob: float) -> float:
    """What JSON can say."""
    return max(log_prob, LOWEST_LOG_PROB)


def completion_log_probs(
    spell: Spelling, tokens: Iterable[Token], num_top: int
) -> CompletionLogProbs:
    """`top_logprobs` always holds the chosen token, so it may have `num_top` + 1 entries."""
    blocks = (_completion_block(spell, block, num_top) for block in blocks_of(tokens))
    first = next(blocks, CompletionLogProbs([], [], [], []))
    if len(first.tokens) < BLOCK:
        return first
    lists = zip(*map(_encoded_lists, chain([first], blocks)), strict=True)
    return CompletionLogProbs(*map(joined, lists))


def _encoded_lists(block: CompletionLogProbs) -> list[bytes]:
    return [encoded(getattr(block, name)) for name in CompletionLogProbs.__struct_fields__]


def _completion_block(spell: Spelling, tokens: Sequence[Token], num_top: int) -> CompletionLogProbs:
    return CompletionLogProbs(
        tokens=[spell(token.token_id) for token in tokens],
        token_logprobs=[
            None if token.log_prob is None else finite(token.log_prob) for token in tokens
        ],
        top_logprobs=[_top_by_text(spell, token, num_top) for token in tokens],
        text_offset=[token.text_offset for token in tokens],
    )


def _top_by_text(spell: Spelling, token: Token, num_top: int) -> dict[str, float] | None:
    if token.log_prob is None:
        return None
    by_text: dict[str, float] = {}
    for token_id, log_prob in [*(token.top or ())[:num_top], (token.token_id, token.log_prob)]:
        # Of tokens that read alike the most probable one comes first.
        by_text.setdefault(spell(token_id), finite(log_prob))
    return by_text


def chat_log_probs(
    tokenizer: Tokenizer, spell: Spelling, tokens: Iterable[Token], num_top: int
) -> ChatLogProbs:
    return ChatLogProbs(
        content=[
            ChatTokenLogProb(
                **_entry(tokenizer, spell, token.token_id, token.log_prob or 0.0),
                top_logprobs=[
                    ChatTopLogProb(**_entry(tokenizer, spell, token_id, log_prob))
                    for token_id, log_prob in (token.top or ())[:num_top]
                ],
            )
            for token in tokens
        ]
    )


def _entry(tokenizer: Tokenizer, spell: Spelling, token_id: int, log_prob: float) -> dict:
    return {
        "token": spell(token_id),
        "logprob": finite(log_prob),
        "bytes": list(tokenizer.token_bytes(token_id) or b""),
    }


def prompt_log_probs(spell: Spelling, tokens: Iterable[Token], num_top: int) -> PromptLogProbsList:
    """vLLM's shape: for each prompt token, token id -> what is known of it."""
    return json_list(_prompt_entry(spell, token, num_top) for token in tokens)


def _prompt_entry(spell: Spelling, token: Token, num_top: int) -> dict[str, PromptLogProb] | None:
    if token.log_prob is None:
        return None
    entries = {
        str(token_id): PromptLogProb(finite(log_prob), rank, spell(token_id))
        for rank, (token_id, log_prob) in enumerate((token.top or ())[:num_top], start=1)
    }
    chosen = PromptLogProb(finite(token.log_prob), None, spell(token.token_id))
    entries.setdefault(str(token.token_id), chosen)
    return entries
