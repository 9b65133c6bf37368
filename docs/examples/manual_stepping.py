"""Drive an engine by hand: requests arrive at steps of a schedule, one of them is given up.

python docs/examples/manual_stepping.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from homing.llm import Engine, EngineConfig, Result, SamplingParams

ARRIVALS = {
    0: ["The capital of France is"],
    3: ["Once upon a time", "2 + 2 ="],
    10: ["The capital of France is"],  # its prompt is in the KV cache by now, if it is long enough
}
"""Step -> the prompts that arrive before it."""

GIVE_UP_AT = 8
"""The step before which the second request is aborted."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive an engine by hand.")
    parser.add_argument("--model", help="a .gguf file or a directory; the demo model without it")
    parser.add_argument("--num-tokens", type=int, default=16)
    options = parser.parse_args()
    params = SamplingParams(num_tokens_to_generate=options.num_tokens, temperature=0.0)
    # Blocks of 4 tokens: short prompts can share them.
    config = EngineConfig(buffer_size_gb=0.5, block_size_tokens=4)
    with Engine(options.model, config=config) as engine:
        for result in run(engine, ARRIVALS, params):
            print(
                f"request {result.request_id}: {result.prompt!r} -> {result.generated_text!r} "
                f"({result.finish_reason}, {result.num_cached_tokens} tokens cached)"
            )


def run(engine: Engine, arrivals: Mapping[int, list[str]], params: SamplingParams) -> list[Result]:
    """The results, in the order in which the requests end."""
    results: list[Result] = []
    request_ids: list[int] = []
    step = 0
    while step <= max(arrivals) or engine.has_unfinished_requests:
        for prompt in arrivals.get(step, []):
            request_ids.append(engine.add_request(prompt, params))
        if step == GIVE_UP_AT:
            engine.abort(request_ids[1])
        for delta in engine.step():
            print(f"step {step:2}: request {delta.request_id} {delta.text!r}")
            if delta.result is not None:
                results.append(delta.result)
        step += 1
    return results


if __name__ == "__main__":
    main()
