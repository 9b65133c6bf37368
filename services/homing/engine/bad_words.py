"""Which tokens would complete a word that an answer must not hold."""

from __future__ import annotations

from collections.abc import Sequence

from homing.tokenizer import Tokenizer


class BadWords:
    """A word is barred as the tokens that it is encoded to, alone and behind a space. Other tokens
    that happen to spell it are not."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str]) -> None:
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self._sequences = {tuple(sequence) for sequence in encoded if sequence}

    def barred(self, generated: Sequence[int]) -> list[int]:
        """The ids that would complete a word after these tokens, ascending."""
        return sorted(
            {
                last
                for *before, last in self._sequences
                if not before or list(generated[-len(before) :]) == before
            }
        )
