"""One choice's tokens become text: whole characters, and nothing of a stop word.

Streamed and whole answers both come from here, which is why they are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from msgspec import Struct
from msgspec.structs import replace

from homing.client import Part
from homing.frontend.parsers import Event
from homing.params import SamplingParams
from homing.tokenizer import IncrementalDecoder, StopMatcher, Tokenizer
from homing.wire import Finish, FinishReason


class Token(Struct, frozen=True, gc=False):
    """One token, with what a client may ask about it."""

    token_id: int
    text_offset: int
    """Where it begins in the choice's text, in characters. A token that begins inside a character
    has that character's offset, one that a stop word swallowed the offset of the end."""
    log_prob: float | None = None
    top: Sequence[tuple[int, float]] | None = None
    """The most probable tokens at its position, best first."""
    epoch: int = 0
    """Of the weights that it was sampled under."""


class PromptTokens:
    """A prompt's tokens as they lie in its text, with what a part tells of them. Of a long prompt
    they are many: they are made one by one, each time they are iterated."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], part: Part) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._log_probs = part.prompt_log_probs or []
        self._top = part.prompt_top

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[Token]:
        decoder = IncrementalDecoder(self._tokenizer, [])
        offset = 0
        tops = repeat(None) if self._top is None else self._top
        for token_id, log_prob, top in zip(self._token_ids, self._log_probs, tops, strict=False):
            yield Token(token_id, offset, log_prob, top)
            offset += len(decoder.push([token_id]))


class Piece(Struct):
    """What a client is to see next of one choice: some text and the tokens behind it."""

    text: str = ""
    tokens: list[Token] = []  # a struct makes a new list for each
    prompt_tokens: PromptTokens | None = None
    """In a choice's first piece, when log-probabilities of the prompt were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop word or stop id, of those that the request named, that ended the choice."""
    events: list[Event] = []
    """Of a chat: what the text means."""
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    """In a choice's first piece: prompt tokens that were found in the cache."""
    oldest_epoch: int | None = None
    """Of the weights that the tokens were sampled under, the newest being that of the last one."""
    newest_epoch: int = 0

    def see_epoch(self, oldest: int | None, newest: int) -> None:
        """More tokens were sampled. Epochs only rise."""
        if oldest is not None:
            self.newest_epoch = newest
            if self.oldest_epoch is None:
                self.oldest_epoch = oldest


def join(pieces: Iterable[Piece]) -> Piece:
    """The pieces of one choice as one."""
    texts: list[str] = []
    whole = Piece()
    for piece in pieces:
        texts.append(piece.text)
        whole.tokens += piece.tokens
        whole.prompt_tokens = whole.prompt_tokens or piece.prompt_tokens
        whole.events += piece.events
        whole.num_reasoning_tokens += piece.num_reasoning_tokens
        whole.num_cached_tokens += piece.num_cached_tokens
        whole.see_epoch(piece.oldest_epoch, piece.newest_epoch)
        whole.finish_reason = piece.finish_reason
        whole.stop_reason = piece.stop_reason
    whole.text = "".join(texts)
    return whole


class ChoiceText:
    """Takes one choice's parts in order, and gives what may be shown of it after each."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        echo: str | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """`echo`: a prompt text that the answer begins with."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._params = params
        self._decoder = IncrementalDecoder(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop_words, include=params.detokenize_stop_sequence)
        self._num_decoded = len(echo or "")  # characters, held ones included
        self._num_shown = 0  # characters in the pieces given out
        self._held = Piece(text=echo or "")
        self._started = False

    def push(self, part: Part) -> Piece | None:
        """The next piece; None while there is no text to show."""
        if not self._started:
            self._started = True
            if part.prompt_log_probs is not None:
                self._held.prompt_tokens = PromptTokens(self._tokenizer, self._prompt_ids, part)
        if part.token_ids or part.num_cached_tokens is not None:  # an engine said so
            self._held.see_epoch(part.epoch, part.epoch)
        self._held.num_cached_tokens += part.num_cached_tokens or 0
        self._held.tokens += self._take_tokens(part)
        if part.finish is not None:
            self._finish(part.finish)
        elif not self._held.text:
            return None
        return self._release()

    def _release(self) -> Piece:
        """What is held, but for tokens whose text is not shown yet: they wait for it."""
        piece, self._held = self._held, Piece()
        self._num_shown += len(piece.text)
        if piece.finish_reason is None:
            waiting = [token for token in piece.tokens if token.text_offset >= self._num_shown]
            self._held.tokens = waiting
            del piece.tokens[len(piece.tokens) - len(waiting) :]
        else:
            piece.tokens = [
                replace(token, text_offset=min(token.text_offset, self._num_shown))
                for token in piece.tokens
            ]
        return piece

    def _take_tokens(self, part: Part) -> list[Token]:
        shown = part.token_ids
        if self._ends_with_stop_id(part):
            shown = shown[:-1]
        if not self._params.return_log_probs:
            # Offsets are for log-probabilities alone, so the tokens can be decoded together.
            offset = self._num_decoded
            self._show(self._decoder.push(shown))
            return [Token(token_id, offset, epoch=part.epoch) for token_id in part.token_ids]
        tokens: list[Token] = []
        for index, token_id in enumerate(part.token_ids):
            log_prob = part.log_probs[index] if part.log_probs else None
            top = part.top[index] if part.top else None
            tokens.append(Token(token_id, self._num_decoded, log_prob, top, part.epoch))
            if index < len(shown):
                self._show(self._decoder.push([token_id]))
        return tokens

    def _ends_with_stop_id(self, part: Part) -> bool:
        """Whether the last token only ended the answer, and is no part of its text."""
        return (
            part.finish is not None
            and isinstance(part.finish.stop, int)
            and not self._params.detokenize_stop_sequence
            and part.token_ids[-1:] == [part.finish.stop]
        )

    def _show(self, text: str) -> None:
        self._num_decoded += len(text)
        self._held.text += self._matcher.push(text)[0]

    def _finish(self, finish: Finish) -> None:
        self._show(self._decoder.finish())
        self._held.text += self._matcher.finish()
        self._held.finish_reason = finish.reason.value
        if finish.reason is FinishReason.STOP:
            asked = isinstance(finish.stop, str) or finish.stop in self._params.stop_token_ids
            self._held.stop_reason = finish.stop if asked else None
