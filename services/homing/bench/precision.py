"""`homing bench precision`: what each format of weights and KV cache costs, and what it saves.

Speed and memory beside how far log-probabilities move: all precisions of a run read the same text,
one request in chunks as a server reads it, and are compared with fp32. All models are loaded first
and then measured in turns, several rounds, the fastest step of each counting: on a shared machine
only what was measured at about the same time can be compared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path

import torch
import tyro
from torch import Tensor

from homing.bench.engine import Run, StepCost, decode, prefill
from homing.engine.batch import Batch
from homing.engine.kv_cache import KVCache, block_bytes
from homing.engine.models import Model
from homing.engine.models.quantization import QUANTIZATIONS, quantization_of
from homing.engine.weights import (
    DTYPES,
    ModelFiles,
    load_model,
    resolve_model,
    say,
)
from homing.errors import ConfigError
from homing.native import default_cache_dir
from homing.tokenizer import Tokenizer

CHUNK_TOKENS = 128  # of the text in one step; every row's logits are kept that long
BLOCK_SIZE = 16


@dataclass(frozen=True)
class PrecisionBenchConfig:
    """Compare formats of weights and KV cache with fp32; print one JSON object."""

    model: str | None = None
    """A Hugging Face directory or a .gguf file. Default: the demo model."""
    precisions: tuple[str, ...] = (
        *("fp32", "bf16", "fp16", "int8", "int4", "fp8"),
        *("bf16/int8", "bf16/fp8", "int8/int8"),
    )
    """WEIGHTS or WEIGHTS/KV: weights in bf16, fp16, fp32, int8, int4 or fp8, a KV cache in bf16,
    int8 or fp8. Without it: as the weights, or bf16 where those are rounded."""
    text: Path | None = None
    """A text file to read. Default: passages that come with Homing."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Decode batch sizes."""
    context: int = 192
    """Tokens of context when decoding."""
    prefill_tokens: int = 512
    """Prompt size for prefill."""
    rounds: int = 3
    """Times that every precision is measured."""
    steps: int = 8
    """Decode steps in each round."""
    num_threads: int = len(os.sched_getaffinity(0))
    """Threads that compute."""

    def __post_init__(self) -> None:
        for precision in self.precisions:
            Precision.parse(precision)
        if min(self.rounds, self.steps, *self.batch) < 1:
            raise ConfigError("--rounds, --steps and --batch start at 1")


@dataclass(frozen=True)
class Precision:
    weights: str
    kv_cache_dtype: str

    @classmethod
    def parse(cls, text: str) -> Precision:
        weights, _, kv_cache_dtype = text.partition("/")
        if weights not in (*DTYPES, *QUANTIZATIONS):
            names = ", ".join((*DTYPES, *QUANTIZATIONS))
            raise ConfigError(f"--precisions {text}: there are {names}, and each of them /KV")
        return cls(weights, kv_cache_dtype or "auto")

    @property
    def quantization(self) -> str | None:
        return self.weights if self.weights in QUANTIZATIONS else None

    def load(self, files: ModelFiles, num_threads: int) -> Model:
        return load_model(
            files,
            dtype=None if self.quantization else self.weights,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            num_threads=num_threads,
            cache_dir=default_cache_dir(os.environ),
            on_progress=lambda line: None,
        )


@dataclass
class Speeds:
    """The fastest step of each kind, in seconds."""

    decode_s: dict[int, float] = field(default_factory=dict)  # batch size -> step
    prefill_s: float = math.inf

    def add(self, run: Run) -> None:
        fastest = min(run.seconds)
        if run.kind == "prefill":
            self.prefill_s = min(self.prefill_s, fastest)
        else:
            self.decode_s[run.batch] = min(self.decode_s.get(run.batch, math.inf), fastest)


@dataclass(frozen=True)
class Reading:
    """What a model makes of a text, for each token but the first."""

    log_probs: Tensor  # [tokens - 1], of the tokens that are there
    first_choices: Tensor  # [tokens - 1], ids


def main(argv: Sequence[str] | None = None) -> int:
    config = tyro.cli(PrecisionBenchConfig, prog="homing bench precision", args=argv)
    print(json.dumps(run(config), indent=2))
    return 0


def run(config: PrecisionBenchConfig) -> dict[str, object]:
    files = resolve_model(config.model, cache_dir=default_cache_dir(os.environ))
    tokens = _tokens(config, files)
    truth = read(Precision("fp32", "auto").load(files, config.num_threads), tokens)
    precisions = [Precision.parse(text) for text in config.precisions]
    models: list[Model] = []
    readings: list[Reading] = []
    for precision in precisions:
        say(f"reading: {precision.weights}, KV cache {precision.kv_cache_dtype}")
        models.append(precision.load(files, config.num_threads))
        readings.append(read(models[-1], tokens))
    speeds = [Speeds() for _ in precisions]
    for number in range(config.rounds):
        say(f"timing: round {number + 1} of {config.rounds}")
        for model, speed in zip(models, speeds, strict=True):
            _time(config, model, speed)
    return {
        "bench": "precision",
        "model": files.name,
        "num_threads": config.num_threads,
        "context_tokens": config.context,
        "prefill_tokens": config.prefill_tokens,
        "text_tokens": len(tokens),
        "results": [
            _result(config, precision, model, speed, reading, truth)
            for precision, model, speed, reading in zip(
                precisions, models, speeds, readings, strict=True
            )
        ],
    }


def read(model: Model, tokens: Sequence[int]) -> Reading:
    """The text as one request, in chunks, from an empty cache."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = KVCache.allocate(model.shape, num_blocks, BLOCK_SIZE)
    ids = torch.tensor(tokens, dtype=torch.int32)
    log_probs, choices = [], []
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens) - 1)
        positions = torch.arange(start, end, dtype=torch.int32)
        batch = Batch(
            token_ids=ids[start:end],
            positions=positions,
            slot_mapping=positions,
            request_index=torch.zeros_like(positions),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            selected=torch.arange(end - start, dtype=torch.int32),
        )
        logits = model.forward(batch, cache)
        following = ids[start + 1 : end + 1].long()[:, None]
        log_probs.append(logits.log_softmax(-1).gather(1, following).flatten().double())
        choices.append(logits.argmax(-1))
    return Reading(torch.cat(log_probs), torch.cat(choices))


def _tokens(config: PrecisionBenchConfig, files: ModelFiles) -> list[int]:
    source = config.text or package_files("homing.bench").joinpath("data", "passages.txt")
    return Tokenizer.from_dir(files.directory).encode(source.read_text(encoding="utf-8"))


def _time(config: PrecisionBenchConfig, model: Model, speeds: Speeds) -> None:
    for batch in config.batch:
        speeds.add(
            decode(
                model,
                batch=batch,
                context=config.context,
                num_steps=config.steps,
                block_size=BLOCK_SIZE,
            )
        )
    speeds.add(prefill(model, tokens=config.prefill_tokens, seconds=0.0, block_size=BLOCK_SIZE))


def _result(
    config: PrecisionBenchConfig,
    precision: Precision,
    model: Model,
    speeds: Speeds,
    reading: Reading,
    truth: Reading,
) -> dict[str, object]:
    distance = (reading.log_probs - truth.log_probs).abs()
    cost = StepCost.of(model, quantization_of(precision.quantization))
    return {
        "weights": precision.weights,
        "kv_cache": str(model.shape.cache_dtype).removeprefix("torch."),
        "backend": type(model).__name__,
        "decode_tokens_per_s": {
            batch: round(batch / seconds, 1) for batch, seconds in speeds.decode_s.items()
        },
        "prefill_tokens_per_s": round(config.prefill_tokens / speeds.prefill_s, 1),
        "weight_bytes_read": cost.weight_bytes,
        "weight_bytes": sum(tensor.nbytes for tensor in model.memory),
        "kv_bytes_per_token": block_bytes(model.shape, block_size=1),
        "perplexity": round(math.exp(-reading.log_probs.mean()), 4),
        "mean_log_prob_distance": float(f"{distance.mean():.3g}"),
        "max_log_prob_distance": float(f"{distance.max():.3g}"),
        "same_first_choice": round(
            float((reading.first_choices == truth.first_choices).double().mean()), 4
        ),
    }
