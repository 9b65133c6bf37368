"""`homing bench agreement`: does the engine say of its tokens what the trainer will say of them?

The engine samples, with prefix hits, chunked prompts and preemptions in play; then transformers, as
a trainer would, computes the log-probabilities of the same tokens in one forward pass. Their
difference is what an importance ratio of an unchanged policy deviates from 1 by.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import tyro

from homing.bench.prompts import PromptSource
from homing.engine.config import EngineConfig
from homing.engine.engine import Engine
from homing.engine.kv_cache import KVCache
from homing.engine.limits import EngineLimits
from homing.engine.weights import (
    DTYPES,
    ModelFiles,
    load_model,
    resolve_model,
    say,
)
from homing.errors import ConfigError
from homing.native import default_cache_dir
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True)
class AgreementBenchConfig:
    """Compare log-probabilities of sampled tokens with transformers'; print one JSON object."""

    model: str | None = None
    """A Hugging Face directory or a .gguf file. Default: the demo model."""
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Of the weights in both, and of the engine's KV cache. Arithmetic on CPUs is fp32."""
    num_tokens: int = 5000
    """Tokens to sample, at least."""
    tokens_per_sample: int = 64
    samples_per_prompt: int = 8
    """They share their prompt, and so its prefix in the cache."""
    prompt_words: int = 96
    shared_words: int = 48
    """Of those, the words that all prompts begin with."""
    temperature: float = 1.0
    max_batch_requests: int = 16
    max_step_tokens: int = 48
    """Smaller than a prompt, so that each is read in chunks."""
    seed: int = 1
    num_threads: int | None = None
    """Threads that compute. Default: one for each core."""
    max_difference: float | None = None
    """Fail if a log-probability of the fp32 engine differs by more. Default: 1e-4."""

    def __post_init__(self) -> None:
        if unknown := set(self.dtypes) - set(DTYPES):
            raise ConfigError(f"--dtypes {', '.join(unknown)}: there are {', '.join(DTYPES)}")
        if min(self.num_tokens, self.tokens_per_sample, self.samples_per_prompt) < 1:
            raise ConfigError("--num-tokens, --tokens-per-sample, --samples-per-prompt start at 1")

    @property
    def threads(self) -> int:
        return self.num_threads or EngineConfig(coordinator="").threads

    @property
    def num_prompts(self) -> int:
        return -(-self.num_tokens // (self.samples_per_prompt * self.tokens_per_sample))


@dataclass
class Sample:
    prompt: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """The engine's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0 when the fp32 engine agrees and all that could disturb it took place."""
    config = tyro.cli(AgreementBenchConfig, prog="homing bench agreement", args=argv)
    torch.set_num_threads(config.threads)
    cache_dir = default_cache_dir(EngineConfig(coordinator="").environ)
    files = resolve_model(config.model, cache_dir=cache_dir)
    results = [_measure(config, files, dtype) for dtype in config.dtypes]
    settings = asdict(config) | {"model": files.name, "num_threads": config.threads}
    json.dump({"bench": "agreement", **settings, "results": results}, sys.stdout, indent=2)
    print()
    return 0 if all(result["valid"] for result in results) else 1


def _measure(config: AgreementBenchConfig, files: ModelFiles, dtype: str) -> dict[str, Any]:
    say(f"{dtype}: the engine samples")
    prompts = _prompts(config, files)
    engine = _engine(config, files, dtype, longest_prompt=max(map(len, prompts)))
    samples = _sample(config, engine, prompts)
    counters = engine.counters
    engine.close()
    say(f"{dtype}: transformers reads what it sampled")
    size = config.samples_per_prompt
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    reference = _reference_log_probs(files, DTYPES[dtype], groups)
    ours = np.concatenate([np.array(sample.log_probs) for sample in samples])
    differences = reference - ours
    largest = float(np.abs(differences).max())
    disturbed = min(counters.cached_tokens, counters.preemptions) > 0
    limit = config.max_difference or 1e-4
    say(f"{dtype}: largest difference {largest:.3g} of {len(ours)} tokens")
    return {
        "dtype": dtype,
        "tokens": len(ours),
        "mean_difference": float(np.abs(differences).mean()),
        "max_difference": largest,
        # k3 of http://joschu.net/blog/kl-approx.html: unbiased, and never negative.
        "kl": float((np.expm1(differences) - differences).mean()),
        "ratio_range": [float(np.exp(differences.min())), float(np.exp(differences.max()))],
        "cached_tokens": counters.cached_tokens,
        "prefilled_tokens": counters.prefilled_tokens,
        "preemptions": counters.preemptions,
        "steps": counters.steps,
        "valid": disturbed and (dtype not in ("fp32", "float32") or largest <= limit),
    }


def _engine(
    config: AgreementBenchConfig, files: ModelFiles, dtype: str, longest_prompt: int
) -> Engine:
    """With a cache so small that requests are preempted."""
    cache_dir = default_cache_dir(EngineConfig(coordinator="").environ)
    model = load_model(files, dtype=dtype, num_threads=config.threads, cache_dir=cache_dir)
    longest = longest_prompt + config.tokens_per_sample
    if longest > model.shape.max_context_tokens:
        raise ConfigError(
            f"a prompt and its sample have {longest:,} tokens; the model's context is "
            f"{model.shape.max_context_tokens:,}: lower --prompt-words or --tokens-per-sample"
        )
    blocks_of_longest = -(-longest // BLOCK_SIZE)
    limits = EngineLimits(
        num_blocks=blocks_of_longest + 2 * config.max_batch_requests,
        block_size=BLOCK_SIZE,
        max_context_tokens=longest,
        max_batch_requests=config.max_batch_requests,
        max_step_tokens=config.max_step_tokens,
        max_queued_requests=config.num_prompts * config.samples_per_prompt,
    )
    cache = KVCache.allocate(model.shape, limits.num_blocks, BLOCK_SIZE)
    return Engine(model, cache, None, limits)


def _prompts(config: AgreementBenchConfig, files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.from_dir(files.directory)
    source = PromptSource(
        num_words=config.prompt_words, num_shared_words=config.shared_words, seed=config.seed
    )
    return [tokenizer.encode(source.next_prompt()) for _ in range(config.num_prompts)]


def _sample(config: AgreementBenchConfig, engine: Engine, prompts: list[list[int]]) -> list[Sample]:
    samples: dict[int, Sample] = {}
    for prompt in prompts:
        for _ in range(config.samples_per_prompt):
            number = len(samples)
            samples[number] = Sample(prompt, [], [])
            params = SamplingParams(
                temperature=config.temperature,
                seed=config.seed + number,
                num_tokens_to_generate=config.tokens_per_sample,
                ignore_eos=True,
                return_log_probs=True,
            )
            engine.add_request(number, np.array(prompt), params)
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.log_probs is not None:
                sample = samples[int(str(output.request.key))]
                sample.token_ids += output.token_ids
                sample.log_probs += output.log_probs.chosen.tolist()
    return list(samples.values())


@torch.inference_mode()
def _reference_log_probs(
    files: ModelFiles, dtype: torch.dtype, groups: list[list[Sample]]
) -> np.ndarray:
    """Of all sampled tokens, in order. A group's samples have one prompt, and so one length."""
    from transformers import AutoModelForCausalLM

    # Rounded to `dtype`, then computed in fp32: bf16 arithmetic takes hours where it is emulated.
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype).float().eval()
    found: list[np.ndarray] = []
    for group in groups:
        tokens = torch.tensor([[*sample.prompt, *sample.token_ids] for sample in group])
        start = len(group[0].prompt)
        logits = model(tokens).logits[:, start - 1 : -1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, start:, None])
        found.append(chosen.flatten().double().numpy())
    return np.concatenate(found)
