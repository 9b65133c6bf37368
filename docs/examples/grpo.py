"""Reinforcement learning (GRPO) of a tiny model on a task that a program can check.

A prompt names a digit; the reward is the share of generated tokens that are that digit. Two engine
ranks generate groups of answers, which share their prompt in the KV cache; the engine's
log-probabilities are those of the behaviour policy. By chance the reward is 0.03; after the 20
iterations of a default run it is 0.9.

    python docs/examples/grpo.py --mode colocated --curve reward.json
        generate, suspend the engines, train, update their weights, resume
    python docs/examples/grpo.py --mode separate
        a trainer process broadcasts new weights while generation goes on

GRPO: Shao et al. 2024, arXiv 2402.03300. With --no-updates the engines never see what was learned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from homing.llm import LLM, AsyncLLM, EngineConfig, Result, SamplingParams
from homing.llm.weight_group import broadcast_weights
from homing.wire import UpdateWeights

WORDS = ["<bos>", "the", "digit", "is", *"0123456789", ",", "write", "it", "again", ":"]
VOCAB_SIZE = 32
NUM_DIGITS = 10
ANSWER_TOKENS = 6
NUM_RANKS = 2


@dataclass(frozen=True)
class Settings:
    iterations: int
    group_size: int
    updates: bool
    learning_rate: float = 3e-3
    optimizer_steps: int = 4
    """On each batch; after the first one, importance ratios differ from 1."""
    clip: float = 0.2
    seed: int = 0


# The task


def prompt_of(digit: int) -> list[int]:
    words = f"<bos> the digit is {digit} , write it again :".split()
    return [WORDS.index(word) for word in words]


def reward_of(digit: int, tokens: Sequence[int]) -> float:
    return sum(token == WORDS.index(str(digit)) for token in tokens) / ANSWER_TOKENS


# The policy


def make_policy(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def engine_options(seed: int) -> dict[str, Any]:
    """Both modes begin with the same weights: those that the trainer makes from this seed, too."""
    config = EngineConfig(dtype="fp32", buffer_size_gb=0.05, block_size_tokens=4, num_threads=1)
    return {
        "model": make_policy(seed).eval(),
        "tokenizer": make_tokenizer(),
        "engine_config": config,
        "data_parallel_size": NUM_RANKS,
    }


# Rollouts


@dataclass(frozen=True)
class Batch:
    """Groups of answers, group after group."""

    tokens: Tensor  # [samples, prompt + answer]
    log_probs: Tensor  # [samples, answer], the engine's
    epochs: Tensor  # [samples, answer], of the weights that sampled each token
    rewards: Tensor  # [samples]


def requests_of(iteration: int, settings: Settings) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [prompt_of(d) for d in range(NUM_DIGITS) for _ in range(settings.group_size)]
    first_seed = (settings.seed * 1000 + iteration) * len(prompts)
    params = [
        SamplingParams(
            num_tokens_to_generate=ANSWER_TOKENS,
            ignore_eos=True,
            return_log_probs=True,
            detokenize_generations=False,
            seed=first_seed + number,
        )
        for number in range(len(prompts))
    ]
    return prompts, params


def batch_of(prompts: list[list[int]], results: list[Result], settings: Settings) -> Batch:
    answers = [result.generated_tokens for result in results]
    digits = [number // settings.group_size for number in range(len(results))]
    return Batch(
        tokens=torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)]),
        log_probs=torch.tensor([result.generated_log_probs for result in results]),
        epochs=torch.tensor([result.token_epochs for result in results]),
        rewards=torch.tensor([reward_of(d, a) for d, a in zip(digits, answers, strict=True)]),
    )


# Training


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.policy = make_policy(settings.seed)
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.learning_rate)
        self._settings = settings
        self._epoch = 0

    def train(self, batch: Batch) -> dict[str, float]:
        """Some optimizer steps on one batch; returns what there is to tell."""
        settings = self._settings
        groups = batch.rewards.view(-1, settings.group_size)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        first_ratio_error = 0.0
        for step in range(settings.optimizer_steps):
            ratios = (self._log_probs(batch.tokens) - batch.log_probs).exp()
            if step == 0:
                # Of answers that these weights began: what others began, they go on with as it is.
                fresh = ratios[(batch.epochs == self._epoch).all(1)]
                first_ratio_error = (fresh - 1).abs().max().item() if len(fresh) else 0.0
            clipped = ratios.clamp(1 - settings.clip, 1 + settings.clip)
            loss = -torch.minimum(ratios * advantages, clipped * advantages).mean()
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self._optimizer.step()
        lag = (self._epoch - batch.epochs).float().mean().item()
        self._epoch += settings.updates
        return {
            "reward": batch.rewards.mean().item(),
            "first_step_ratio_error": first_ratio_error,
            "epochs_behind": lag,
        }

    def _log_probs(self, tokens: Tensor) -> Tensor:
        """Of the answers, [samples, answer]."""
        logits = self.policy(tokens).logits[:, -ANSWER_TOKENS - 1 : -1]
        chosen = tokens[:, -ANSWER_TOKENS:, None]
        return torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]


def colocated(settings: Settings) -> Iterator[dict[str, float]]:
    """Engines and trainer take turns; while it trains, they hold neither cache nor weights."""
    trainer = Trainer(settings)
    with LLM(use_coordinator=True, **engine_options(settings.seed)) as llm:
        for iteration in range(settings.iterations):
            prompts, params = requests_of(iteration, settings)
            results = llm.generate(prompts, params, progress=False)
            llm.pause()
            llm.suspend(kv="discard", weights="offload")
            yield trainer.train(batch_of(prompts, results, settings))
            if settings.updates:
                llm.update_weights(trainer.policy)
            llm.resume()
            llm.unpause()


async def separate(settings: Settings, report: Any) -> None:
    """One batch is generated while the trainer works on the one before it, and gets the new weights
    in the middle of its answers."""
    with ExitStack() as stack:
        trainer = stack.enter_context(TrainerProcess(settings))
        async with AsyncLLM(**engine_options(settings.seed)) as llm:
            generating = asyncio.create_task(generate(llm, 0, settings))
            for iteration in range(settings.iterations):
                batch = await generating
                if iteration + 1 < settings.iterations:
                    generating = asyncio.create_task(generate(llm, iteration + 1, settings))
                report(await trainer.ask(batch))
                if settings.updates:
                    await llm.update_weights(await trainer.ask("broadcast"))
                    await trainer.ask("taken")


async def generate(llm: AsyncLLM, iteration: int, settings: Settings) -> Batch:
    prompts, params = requests_of(iteration, settings)
    return batch_of(prompts, await llm.generate(prompts, params, progress=False), settings)


class TrainerProcess:
    """A trainer in a process of its own, asked one thing at a time."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=trainer_main, args=(theirs, settings), daemon=True)

    def __enter__(self) -> TrainerProcess:
        self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.send("stop")
        self._process.join()

    async def ask(self, question: Any) -> Any:
        self._pipe.send(question)
        return await asyncio.to_thread(self._pipe.recv)


def trainer_main(pipe: Connection, settings: Settings) -> None:
    trainer = Trainer(settings)
    while (question := pipe.recv()) != "stop":
        if isinstance(question, Batch):
            pipe.send(trainer.train(question))
        else:
            tensors = trainer.policy.state_dict().items()
            with broadcast_weights(tensors, ranks=range(NUM_RANKS)) as update:
                assert isinstance(update, UpdateWeights)
                pipe.send(update)
                assert pipe.recv() == "taken"
            pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on a tiny model.")
    parser.add_argument("--mode", choices=["colocated", "separate"], default="colocated")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--no-updates", action="store_true", help="train, but never tell engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path, help="where to write the rewards, as JSON")
    options = parser.parse_args()
    settings = Settings(
        options.iterations, options.group_size, not options.no_updates, seed=options.seed
    )
    curve: list[dict[str, float]] = []

    def report(facts: dict[str, float]) -> None:
        curve.append(facts)
        shown = "  ".join(f"{name} {value:.3g}" for name, value in facts.items())
        print(f"iteration {len(curve):3}  {shown}", flush=True)

    if options.mode == "colocated":
        for facts in colocated(settings):
            report(facts)
    else:
        asyncio.run(separate(settings, report))
    if options.curve:
        options.curve.write_text(json.dumps(curve, indent=1))


if __name__ == "__main__":
    main()
