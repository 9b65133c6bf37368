"""The demo model's own tokenizer and chat template, against what llama.cpp and its authors say."""

from __future__ import annotations

import pytest

from homing.tokenizer import IncrementalDecoder, Tokenizer
from tests.support.backends import demo_files

# Text -> ids, as llama.cpp gives them for the same GGUF file.
REFERENCE = {
    "Hello world": [19556, 905],
    "  leading   spaces\n\n\ttabs": [216, 2899, 256, 5600, 1116, 197, 100, 7366],
    "naïve café — “quotes” …": [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548],
    "Привет, мир": [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "2+2=4; x1y22z333": [34, 27, 34, 45, 36, 43, 1792, 33, 105, 34, 34, 106, 35, 35, 35],
    "عربي و עברית": [34966, 20602, 31462, 23339, 35964, 12960, 112, 37657, 30825, 28532, 120],
    "\x00\x01 control": [190, 191, 1533],
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(demo_files().directory)


@pytest.mark.parametrize(("text", "ids"), REFERENCE.items())
def test_ids_are_those_of_llama_cpp_and_decode_to_the_text(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_grows_a_character_at_a_time(tokenizer):
    decoder = IncrementalDecoder(tokenizer, [])
    ids = tokenizer.encode("Hi 👩!")
    pieces = [decoder.push([token]) for token in ids]
    assert "".join(pieces) == "Hi 👩!"
    assert len(ids) > len([piece for piece in pieces if piece])
    assert all("\ufffd" not in piece for piece in pieces)


def test_the_chat_template_adds_a_system_message_only_where_there_is_none(tokenizer):
    user = {"role": "user", "content": "hi"}
    rest = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    assert tokenizer.render_chat([user]) == (system + "trained by Hugging Face<|im_end|>\n" + rest)
    own = {"role": "system", "content": "Be brief."}
    assert tokenizer.render_chat([own, user]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + rest
