"""Long answers that do not hold up a training step: taken out when it comes, put back in after it.

Each answer's tokens, log-probabilities and epochs are kept, and the next submission goes on from
them: as generated tokens, with the same noise. Coordinator and engines are processes of their own.

    python docs/examples/partial_rollouts.py
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from homing.client import Client
from homing.engine.weights import resolve_model
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer
from homing.wire import FinishReason

PROMPTS = ["Once upon a time", "The history of the sea", "My favourite recipe"]


@dataclass
class Rollout:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    seed: int | None = None
    is_complete: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description="Partial rollouts.")
    parser.add_argument("--model", help="a .gguf file or a directory; the demo model without it")
    parser.add_argument("--num-tokens", type=int, default=48)
    options = parser.parse_args()
    directory = resolve_model(options.model).directory
    with tempfile.TemporaryDirectory() as private:
        address = f"ipc://{Path(private, 'coordinator.sock')}"
        with fleet(address, directory):
            asyncio.run(roll_out(address, directory, options.num_tokens))


async def roll_out(address: str, model: Path, num_tokens: int) -> None:
    client = Client(address)
    await client.start()
    try:
        await client.wait_for_ranks(1)
        tokenizer = Tokenizer.from_dir(model)
        rollouts = [Rollout(tokenizer.encode(prompt)) for prompt in PROMPTS]
        while not all(rollout.is_complete for rollout in rollouts):
            train = asyncio.Event()
            running = [
                asyncio.create_task(advance(client, rollout, num_tokens, train))
                for rollout in rollouts
                if not rollout.is_complete
            ]
            await train.wait()
            await client.pause("abort")
            await asyncio.gather(*running)
            # Here a trainer would step. What it gives back are the weights that were there before.
            await client.update_weights(model)
            await client.unpause()
        for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
            print(f"{prompt!r}: tokens by epoch {dict(sorted(Counter(rollout.epochs).items()))}")
            print(f"    {tokenizer.decode(rollout.tokens)!r}")
    finally:
        await client.close()


async def advance(client: Client, rollout: Rollout, num_tokens: int, train: asyncio.Event) -> None:
    """Generate until the rollout is complete or somebody aborts it; keep what came.

    After a third of all tokens it is time to train.
    """
    num_before = len(rollout.tokens)
    params = SamplingParams(
        num_tokens_to_generate=num_tokens,
        ignore_eos=True,
        return_log_probs=True,
        seed=rollout.seed,
    )
    tokens = array("I", rollout.prompt + rollout.tokens).tobytes()
    generation = client.submit(tokens, params, num_resumed_tokens=len(rollout.tokens))
    rollout.seed = generation.seed
    async for part in generation:
        rollout.tokens += part.token_ids
        rollout.log_probs += part.log_probs or []
        rollout.epochs += [part.epoch] * len(part.token_ids)
        if part.finish is not None:
            rollout.is_complete = part.finish.reason is not FinishReason.ABORT
        if rollout.is_complete or len(rollout.tokens) - num_before >= num_tokens // 3:
            train.set()


@contextmanager
def fleet(address: str, model: Path) -> Iterator[None]:
    engine = ["homing.engine", str(model), "--coordinator", address, "--kv-cache-gb", "0.5"]
    commands = [["homing.coordinator", "--bind", address], engine]
    processes = [subprocess.Popen([sys.executable, "-m", *command]) for command in commands]
    try:
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
