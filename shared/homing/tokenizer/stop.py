"""Stop words, found in text that arrives in pieces.

Knows nothing of tokens. The answer does not depend on where the pieces were cut: the word that is
complete first ends the text; of those complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


def _borders(word: str) -> list[int]:
    """For each prefix of `word`: how long its longest proper prefix that is also a suffix is
    (Knuth, Morris and Pratt, 1977)."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        length += word[i] == word[length]
        borders[i] = length
    return borders


class StopMatcher:
    """Lets text through up to the first stop word, holding back what may yet become one."""

    def __init__(self, stop_words: Sequence[str], *, include: bool) -> None:
        """`include`: the word that matched stays in the text."""
        self._words = [(word, _borders(word)) for word in stop_words]
        self._matched = [0] * len(stop_words)  # characters of each word that the text ends with
        self._include = include
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to send, and the stop word once one has matched.

        Nothing after a stop word comes out, in this call or in later ones.
        """
        if self._stop is not None or not self._words:
            return ("" if self._stop is not None else text), self._stop
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            word = self._advance(character)
            if word is not None:
                self._stop, self._held = word, ""
                return pending[: end if self._include else end - len(word)], word
        held = 0 if self._include else max(self._matched)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held], None

    def finish(self) -> str:
        """The text still held back: the answer ended, and it was no stop word."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take one more character; the longest stop word that it completes."""
        complete: str | None = None
        for index, (word, borders) in enumerate(self._words):
            matched = self._matched[index]
            while matched and word[matched] != character:
                matched = borders[matched - 1]
            matched += word[matched] == character
            if matched == len(word):
                complete = word if complete is None else max(complete, word, key=len)
                matched = borders[-1]
            self._matched[index] = matched
        return complete
