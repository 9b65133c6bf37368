"""The bytes that each token stands for, whatever kind of tokenizer it belongs to.

The text of a sequence is the UTF-8 of its tokens' bytes, joined: a token may be part of a
character, and single ids cannot be decoded to text one by one. Three kinds of vocabulary are told
apart by the decoder that tokenizer.json declares:

- byte-level (GPT-2, Llama 3, Qwen): each character of a token's spelling is one byte;
- byte fallback (Llama 2, Mistral, Gemma): `<0xE2>` is one byte, other tokens are text;
- anything else: a token is the text that it adds behind another token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import tokenizers

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders in a tree of `Sequence`s, in order."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [leaf for child in decoder["decoders"] for leaf in _flatten(child)]


class _TokenizerFile(msgspec.Struct):
    """What is read of a tokenizer.json; a vocabulary takes long to read and is not wanted."""

    decoder: dict[str, Any] | None


class TokenPieces:
    """Token id -> bytes, worked out when first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {
            token: (added.content, added.special)
            for token, added in backend.get_added_tokens_decoder().items()
        }
        file = msgspec.json.decode(backend.to_str(), type=_TokenizerFile)
        decoders = _flatten(file.decoder)
        kinds = {decoder["type"] for decoder in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_leading_space = any(map(_strips_leading_space, decoders))
        """Whether a space that begins the whole text is an artefact of the spelling."""
        self._pieces: dict[int, bytes | None] = {}
        self._anchor = self._find_anchor()

    def is_special(self, token: int) -> bool:
        """Whether this is a control token, which texts leave out."""
        return self._added.get(token, ("", False))[1]

    def __getitem__(self, token: int) -> bytes | None:
        """The token's bytes; None if the vocabulary does not have it."""
        try:
            return self._pieces[token]
        except KeyError:
            piece = self._pieces[token] = self._piece(token)
            return piece

    def join(self, tokens: Iterable[int], *, skip_special: bool) -> bytes:
        """The bytes of a sequence. Unknown ids add nothing."""
        return b"".join(
            self[token] or b"" for token in tokens if not (skip_special and self.is_special(token))
        )

    def _piece(self, token: int) -> bytes | None:
        if token in self._added and self._added[token][1]:
            return self._added[token][0].encode()
        spelling = self._backend.id_to_token(token) if token >= 0 else None
        if spelling is None:
            return None
        if self._byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in spelling):
                return bytes(_BYTE_OF_CHARACTER[character] for character in spelling)
            return spelling.encode()
        if self._byte_fallback and (match := _FALLBACK_BYTE.fullmatch(spelling)):
            return bytes([int(match[1], 16)])
        anchored = self._backend.decode([*self._anchor, token], skip_special_tokens=False)
        return anchored[len(self._backend.decode(self._anchor)) :].encode()

    def _find_anchor(self) -> list[int]:
        """A token to put before another, so that the other does not begin the text."""
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return ids[-1:]


def _strips_leading_space(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Strip":
        return decoder["content"] == " " and decoder["start"] > 0
    return decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never"
