"""What /tokenize and /detokenize do."""

from __future__ import annotations

from homing.errors import InvalidRequest
from homing.frontend.chat import chat_prompt
from homing.frontend.completions import check_token_ids
from homing.frontend.openai.reading import read_body
from homing.frontend.openai.requests import read_chat
from homing.frontend.openai.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from homing.frontend.openai.tools import tool_choice
from homing.frontend.service import ServedModel

MAX_CHARACTERS = 1024 * 1024
"""Of a text to tokenize: the prompts of other requests wait meanwhile, about half a second."""


def tokenize(body: bytes, model: ServedModel) -> Tokenized:
    """Raises `InvalidRequest`."""
    request = read_body(TokenizeRequest, body)
    model.answers_to(request.model)
    token_ids = _token_ids(request, body, model)
    strings = None
    if request.return_token_strs:
        strings = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    return Tokenized(len(token_ids), model.card.max_context_tokens, token_ids, strings)


def _token_ids(request: TokenizeRequest, body: bytes, model: ServedModel) -> list[int]:
    if request.messages is not None:
        chat = read_chat(body)
        return chat_prompt(chat, tool_choice(chat), model).token_ids
    prompt, special = request.prompt, request.add_special_tokens is not False
    if prompt is None:
        raise InvalidRequest("give a prompt or messages", field="prompt")
    if len(prompt) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"prompt has {len(prompt)} characters; the limit is {MAX_CHARACTERS}", field="prompt"
        )
    return model.tokenizer.encode(prompt, add_special_tokens=special)


def detokenize(body: bytes, model: ServedModel) -> Detokenized:
    """Raises `InvalidRequest`."""
    request = read_body(DetokenizeRequest, body)
    model.answers_to(request.model)
    tokens = check_token_ids(request.tokens, model.card.vocab_size, field="tokens")
    skip = bool(request.skip_special_tokens)
    return Detokenized(model.tokenizer.decode(tokens, skip_special_tokens=skip))
