"""Tokenizers whose tokens are bytes, so that every multi-byte character spans several tokens.

`byte_level` is of the GPT-2 kind and `byte_fallback` of the SentencePiece kind; both have a ChatML
template. Ids 0 to 4 are SPECIALS, and in both `byte_id(b)` is the token of one byte.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
PAD, BOS, EOS, IM_START, IM_END = range(5)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

ALTERNATING_TEMPLATE = """\
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif -%}
[{{ message['role'] }}]{{ message['content'] }}
{%- endfor -%}"""


def byte_id(byte: int) -> int:
    """The token of one byte, in either tokenizer."""
    return len(SPECIALS) + byte


def byte_ids(text: str | bytes) -> list[int]:
    """`text`, one token per UTF-8 byte."""
    data = text.encode() if isinstance(text, str) else text
    return [byte_id(byte) for byte in data]


def byte_level(
    directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, bos: bool = True
) -> Path:
    """Write a GPT-2-like tokenizer of 256 bytes and a few merges."""
    characters = _byte_characters()
    vocab = {special: index for index, special in enumerate(SPECIALS)}
    vocab.update((characters[byte], byte_id(byte)) for byte in range(256))
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _save(backend, directory, chat_template, bos)


def byte_fallback(directory: Path) -> Path:
    """Write a Llama-2-like tokenizer: some letters, and a token `<0x..>` for each byte."""
    vocab = {special: index for index, special in enumerate(SPECIALS)}
    vocab.update((f"<0x{byte:02X}>", byte_id(byte)) for byte in range(256))
    for word in ["▁", "h", "e", "l", "o", "▁h"]:
        vocab[word] = len(vocab)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "h")], byte_fallback=True, unk_token=SPECIALS[PAD])
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(backend, directory, CHAT_TEMPLATE, bos=True)


def _byte_characters() -> dict[int, str]:
    """Byte -> the character that spells it, read off the library's own pre-tokenizer."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling: dict[int, str] = {}
    three_bytes = [0x800, *range(0x1000, 0xD000, 0x1000), 0xD000, 0xE000, 0xF000]
    for code in [*range(0x800), *three_bytes, *range(0x10000, 0x110000, 0x10000)]:
        [(spelled, _)] = spell.pre_tokenize_str(chr(code))
        spelling.update(zip(chr(code).encode(), spelled, strict=True))
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(spelling.values()))
    never = [byte for byte in range(256) if byte not in spelling]  # in no UTF-8 text
    spelling.update(zip(never, unused, strict=True))
    return spelling


def _save(backend: Tokenizer, directory: Path, chat_template: str | None, bos: bool) -> Path:
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": SPECIALS[EOS], "pad_token": SPECIALS[PAD]}
    if bos:
        config["bos_token"] = SPECIALS[BOS]
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
