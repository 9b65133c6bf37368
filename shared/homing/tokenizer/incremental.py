"""Text that grows with its tokens, one whole character at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from homing.tokenizer.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Turns token ids into text as they come, holding back the bytes of an unfinished character.

    What the pushes and `finish` return, joined, is what `Tokenizer.decode` gives for prompt and
    answer, less the prompt's whole characters: if the prompt breaks off inside a character, the
    answer begins with that character. A token takes constant time, even amid endless invalid bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """`skip_special_tokens`: leave control tokens out of the text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _Utf8Decoder(errors="replace")
        self._utf8.decode(tokenizer.last_bytes(prompt_ids, 3))  # an unfinished character has 1 to 3
        self._drop_space = tokenizer.strips_leading_space and not tokenizer.last_bytes(
            prompt_ids, 1
        )

    def push(self, ids: Sequence[int]) -> str:
        """The characters that these tokens complete. Bytes that can be none become U+FFFD."""
        data = self._tokenizer.to_bytes(ids, skip_special_tokens=self._skip_special_tokens)
        return self._begin(self._utf8.decode(data))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was not finished, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _begin(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
