"""Start coordinator and engines as processes of their own, and speak to them through a client.

This is what `LLM(use_coordinator=True)` and `homing serve` do for you. Here each process could as
well be started by another program, and outlive this one.

    python docs/examples/coordinator_and_client.py --num-engines 2
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from homing.client import Client
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer

PROMPTS = ["The capital of France is", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Coordinator, engines and a client.")
    parser.add_argument("--model", help="a .gguf file or a directory; the demo model without it")
    parser.add_argument("--num-engines", type=int, default=2)
    parser.add_argument("--num-tokens", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{Path(directory, 'coordinator.sock')}"
        with fleet(address, options.model, options.num_engines):
            asyncio.run(use(address, options.num_engines, options.num_tokens))


@contextmanager
def fleet(address: str, model: str | None, num_engines: int) -> Iterator[None]:
    """One coordinator and its engines. The order in which they start does not matter."""
    engine = ["homing.engine", "--coordinator", address, "--kv-cache-gb", "0.5"]
    if model is not None:
        engine.append(model)
    commands = [engine] * num_engines + [["homing.coordinator", "--bind", address]]
    processes = [subprocess.Popen([sys.executable, "-m", *command]) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def use(address: str, num_engines: int, num_tokens: int) -> None:
    client = Client(address)
    await client.start()
    try:
        await client.wait_for_ranks(num_engines)
        card = await client.wait_for_model()
        tokenizer = Tokenizer.from_dir(card.tokenizer_dir)
        params = SamplingParams(num_tokens_to_generate=num_tokens, temperature=0.0)
        texts = await asyncio.gather(
            *(generate(client, tokenizer, prompt, params) for prompt in PROMPTS)
        )
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"{prompt!r} -> {text!r}")
        print(f"requests the fleet has served: {(await client.stats())['submitted']}")
    finally:
        await client.close()


async def generate(
    client: Client, tokenizer: Tokenizer, prompt: str, params: SamplingParams
) -> str:
    """Tokens in, tokens out: text is the client's own business."""
    prompt_tokens = array("I", tokenizer.encode(prompt)).tobytes()
    token_ids: list[int] = []
    async for part in client.submit(prompt_tokens, params):
        token_ids += part.token_ids
    return tokenizer.decode(token_ids)


if __name__ == "__main__":
    main()
