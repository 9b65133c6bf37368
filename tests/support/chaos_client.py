"""`python -m tests.support.chaos_client PLAN RESULTS`: a client process that a test may kill.

PLAN is JSON: the coordinator's address, the prompts, the requests (number, index of the prompt,
when it is sent in seconds after `start`) and how many tokens each generates. Each request that ends
adds one JSON line to RESULTS: who is started in place of a killed one goes on with the rest.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from homing.client import Client
from homing.errors import HomingError
from homing.params import SamplingParams

RETRY_S = 0.2


def ended(results: Path) -> list[dict[str, Any]]:
    """What was written. A killed process may leave a last line that is cut off."""
    if not results.exists():
        return []
    lines = results.read_text().split("\n")
    return [json.loads(line) for line in lines if line.endswith("}")]


async def main(plan: dict[str, Any], results: Path) -> None:
    done = {each["number"] for each in ended(results)}
    client = Client(plan["address"], max_engine_deaths=1000, patience_s=60.0)
    await client.start(60.0)
    await client.wait_for_model(60.0)
    with results.open("a") as file:
        file.write("\n")  # ends the line of a killed one
        left = [each for each in plan["requests"] if each[0] not in done]
        await asyncio.gather(*(_serve(client, plan, each, file) for each in left))
    await client.close()


async def _serve(
    client: Client, plan: dict[str, Any], request: tuple[int, int, float], file: Any
) -> None:
    number, prompt, at_s = request
    await asyncio.sleep(max(0.0, plan["start"] + at_s - time.time()))
    tokens = array("I", plan["prompts"][prompt]).tobytes()
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=plan["num_tokens"], ignore_eos=True
    )
    refusals = 0
    while True:
        try:
            generation = client.submit(tokens, params)
            ids = [token async for part in generation for token in part.token_ids]
            break
        except HomingError:  # refused, or failed: what an application would do is try again
            refusals += 1
            await asyncio.sleep(RETRY_S)
    line = {"number": number, "tokens": ids, "attempts": generation.attempt + 1}
    file.write(json.dumps(line | {"refusals": refusals}) + "\n")
    file.flush()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
