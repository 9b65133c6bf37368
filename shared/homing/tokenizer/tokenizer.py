"""A model's tokenizer, read from its directory.

Holds the files `tokenizer.json` and, if they are there, `tokenizer_config.json`,
`chat_template.jinja` and `generation_config.json`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers

from homing.errors import ConfigError, InvalidRequest
from homing.tokenizer.pieces import TokenPieces

if TYPE_CHECKING:
    from homing.tokenizer.chat_template import ChatTemplate


class Tokenizer:
    """Encodes, decodes and renders chats for one model.

    Several threads may use one at the same time.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None
    ) -> None:
        """`config`: the content of tokenizer_config.json; `chat_template`: Jinja source."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = TokenPieces(backend)
        self._special_tokens = _special_tokens(config)
        self._template_source = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        bos = self._special_tokens.get("bos_token")
        self.bos_token_id: int | None = backend.token_to_id(bos) if bos else None
        """The id that begins a sequence; None if the model knows none."""

    @classmethod
    def from_dir(cls, path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read a tokenizer's directory. Raises `ConfigError` if there is none in it.

        `chat_template`: Jinja source to use instead of the model's own.
        """
        directory = Path(path)
        if not (directory / "tokenizer.json").is_file():
            raise ConfigError(f"{directory} holds no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            config = _read_json(directory / "tokenizer_config.json")
            template = chat_template or _read_template(directory, config)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"the tokenizer in {directory} cannot be read: {error}") from error
        tokenizer = cls(backend, config, template)
        if tokenizer.bos_token_id is None:
            generation = _read_json(directory / "generation_config.json")
            tokenizer.bos_token_id = generation.get("bos_token_id")
        return tokenizer

    # ---- text -> ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: with what the model wants around a text, such as its BOS."""
        # Batches release the GIL while they are worked on; `encode` does not. Without offsets, the
        # fast ones take a third less, and forgetting them takes no time with the GIL held.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def fewest_tokens(self, text: str) -> int:
        """A bound from below on the number of this text's tokens. The first call goes through the
        vocabulary, with the GIL held; later ones cost nothing."""
        return len(text) // self._most_characters_per_token

    @cached_property
    def _most_characters_per_token(self) -> int:
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # Composing normalizers (NFC) make at most one character of four.
        return longest if self._backend.normalizer is None else 4 * longest

    # ---- ids -> text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD; ids that the
        vocabulary does not have add nothing."""
        data = self._pieces.join(ids, skip_special=skip_special_tokens)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def decode_whole(self, ids: Sequence[int]) -> str:
        """As `decode`, without the beginning of a character that the sequence does not finish: that
        is how far a text that goes on is settled."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(self.to_bytes(ids))
        return text.removeprefix(" ") if self.strips_leading_space else text

    def to_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of these tokens amid a text."""
        return self._pieces.join(ids, skip_special=skip_special_tokens)

    def last_bytes(self, ids: Sequence[int], count: int) -> bytes:
        """The last `count` bytes of a sequence's text, or as many as there are."""
        visible = (self.to_bytes([token]) for token in reversed(ids))
        tail = b""
        for piece in islice(filter(None, visible), count):
            tail = piece + tail
        return tail[-count:]

    @property
    def strips_leading_space(self) -> bool:
        """Whether a space that begins a text is left out by `decode`."""
        return self._pieces.strips_leading_space

    def token_bytes(self, token: int) -> bytes | None:
        """What the token stands for, a part of a character perhaps; None if it is not known."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        r"""The token as people read it: its text; `bytes:\xf0\x9f` for a part of a character."""
        piece = self._pieces[token]
        if piece is None:
            return f"token_id:{token}"
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    # ---- chat

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @property
    def chat_template(self) -> str | None:
        """The template's Jinja source."""
        return self._template_source

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's template makes of a chat; encode it without special tokens.

        `variables` are for the template, such as `enable_thinking`. Raises `InvalidRequest` with
        the template's message, or if there is no template.
        """
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )

    def warm_up(self) -> None:
        """Do now what the first use of each part would do while others wait. A template that does
        not compile is an error when a chat is rendered."""
        self.fewest_tokens("")
        with suppress(InvalidRequest):
            _ = self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        # Jinja is imported here: engines render no chats, and are to start quickly.
        from homing.tokenizer.chat_template import ChatTemplate

        return ChatTemplate(self._template_source, self._special_tokens)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin: written as a string, or as the content of an object."""
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {
        name: cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        for name, value in found.items()
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins; the configuration may hold one template, or several by name."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template: str | list[dict[str, str]] | None = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
