"""Serve HTTP from Python, and use it from several clients at a time.

The engines answer the HTTP clients and this program alike.

    python docs/examples/server_with_clients.py --num-clients 4
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI

from homing.llm import AsyncLLM, EngineConfig, SamplingParams, ServeConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="A server and its clients.")
    parser.add_argument("--model", help="a .gguf file or a directory; the demo model without it")
    parser.add_argument("--data-parallel-size", type=int, default=2)
    parser.add_argument("--num-clients", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=24)
    asyncio.run(run(parser.parse_args()))


async def run(options: argparse.Namespace) -> None:
    async with AsyncLLM(
        options.model,
        engine_config=EngineConfig(buffer_size_gb=0.5),
        data_parallel_size=options.data_parallel_size,
    ) as llm:
        # Port 0: a free one. With blocking=True, serve would return when somebody shuts down.
        url = await llm.serve(ServeConfig(port=0, frontend_replicas=2), blocking=False)
        print(f"serving at {url}")
        params = SamplingParams(num_tokens_to_generate=options.num_tokens)
        here = asyncio.create_task(llm.generate("Once upon a time", params))
        clients = [ask(url, number, options.num_tokens) for number in range(options.num_clients)]
        answers = await asyncio.gather(*clients)
        for number, answer in enumerate(answers):
            print(f"client {number}: {answer!r}")
        print(f"here: {(await here).generated_text!r}")


async def ask(url: str, number: int, num_tokens: int) -> str:
    """One client: streams the answer to one question."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        models = await client.models.list()
        stream = await client.chat.completions.create(
            model=models.data[0].id,
            messages=[{"role": "user", "content": f"Tell me about the number {number}."}],
            max_tokens=num_tokens,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return "".join(pieces)


if __name__ == "__main__":
    main()
