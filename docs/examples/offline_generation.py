"""Generate without a server: in this process, or by engines behind a coordinator.

python docs/examples/offline_generation.py
python docs/examples/offline_generation.py --use-coordinator --data-parallel-size 2
python docs/examples/offline_generation.py --use-coordinator --mode async
torchrun --nproc-per-node 2 docs/examples/offline_generation.py --use-coordinator
"""

from __future__ import annotations

import argparse
import asyncio

from homing.llm import LLM, AsyncLLM, EngineConfig, Result, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 ="]


def main() -> None:
    options = read_options()
    config = EngineConfig(dtype=options.dtype, buffer_size_gb=options.buffer_size_gb)
    params = SamplingParams(
        num_tokens_to_generate=options.num_tokens,
        temperature=options.temperature,
        seed=options.seed,
        return_log_probs=True,
    )
    if options.mode == "sync":
        results = generate(options, config, params)
    else:
        results = asyncio.run(generate_async(options, config, params))
    for result in results:
        show(result)


def generate(
    options: argparse.Namespace, config: EngineConfig, params: SamplingParams
) -> list[Result]:
    with LLM(
        options.model,
        engine_config=config,
        use_coordinator=options.use_coordinator,
        data_parallel_size=options.data_parallel_size,
    ) as llm:
        # Under torchrun the other ranks wait at the end of this block.
        return llm.generate(PROMPTS, params) if llm.is_primary_rank else []


async def generate_async(
    options: argparse.Namespace, config: EngineConfig, params: SamplingParams
) -> list[Result]:
    async with AsyncLLM(
        options.model,
        engine_config=config,
        use_coordinator=options.use_coordinator,
        data_parallel_size=options.data_parallel_size,
    ) as llm:
        if not llm.is_primary_rank:
            return []
        return await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS))


def show(result: Result) -> None:
    assert result.generated_log_probs is not None
    print(f"{result.prompt!r} -> {result.generated_text!r}")
    print(
        f"    {len(result.generated_tokens)} tokens, log-probability "
        f"{sum(result.generated_log_probs):.3f}, {result.finish_reason}, {result.latency:.2f} s"
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate without a server.")
    parser.add_argument("--model", help="a .gguf file or a directory; the demo model without it")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--use-coordinator", action="store_true")
    parser.add_argument("--data-parallel-size", type=int, help="engines, with a coordinator")
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--buffer-size-gb", type=float, default=0.5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
