"""A converted GGUF file holds what the original did: weights, shape, tokenizer, template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from homing.engine.models.config import read_config
from homing.engine.weights import resolve_model
from homing.errors import ConfigError
from homing.tokenizer import Tokenizer
from tests.support.backends import demo_files
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_models import tiny_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"


def converted(gguf_file: Path) -> Path:
    cache_dir = gguf_file.parent / "cache"
    files = resolve_model(str(gguf_file), cache_dir=cache_dir, on_progress=lambda line: None)
    return files.directory


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_and_shape_survive_the_round_trip(family: str, tmp_path: Path) -> None:
    directory = converted(make_tiny_gguf(family, tmp_path / "tiny.gguf"))
    original = tmp_path / f"{family}-of-tiny"
    assert read_config(directory) == read_config(original)
    ours, theirs = (load_file(path / "model.safetensors") for path in (directory, original))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_tokenizer_survives_the_round_trip(tmp_path: Path) -> None:
    directory = converted(make_tiny_gguf("llama", tmp_path / "tiny.gguf"))
    ours, theirs = Tokenizer.from_dir(directory), tiny_tokenizer()
    for text in ("The capital of France", "<|im_start|>user\nhé<|im_end|>", "1234\n\n  x"):
        assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected


def test_the_demo_tokenizer_gives_the_ids_of_llama_cpp() -> None:
    tokenizer = Tokenizer.from_dir(demo_files().directory)
    cases = json.loads((FIXTURES / "smollm2_tokenizer_reference.json").read_text("utf-8"))
    assert len(cases) == 16
    for text, ids in cases:
        assert tokenizer.encode(text) == ids


def test_the_demo_model_has_the_shape_of_its_release() -> None:
    config = read_config(demo_files().directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.rms_norm_eps, config.rope["rope_theta"]) == (1e-5, 100000.0)
    assert config.tied_head


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"architecture": "mamba"}, "GGUF architecture 'mamba' is not supported"),
        ({"tokenizer_ggml_pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
    ],
)
def test_a_file_that_we_cannot_read_right_is_refused(
    overrides: dict[str, str], reason: str, tmp_path: Path
) -> None:
    gguf_file = make_tiny_gguf("llama", tmp_path / "tiny.gguf", **overrides)
    with pytest.raises(ConfigError, match=reason):
        converted(gguf_file)
    assert not list((tmp_path / "cache" / "models").glob("tiny-*[!k]"))
