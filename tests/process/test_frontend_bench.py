"""`homing bench frontend`, briefly."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_bench_prints_what_a_frontend_costs_beside_a_bare_app() -> None:
    flags = "--seconds 0.4 --connections 4 --max-tokens 8"
    flags += " --long-prompts 1 --long-prompt-tokens 2000"
    command = [sys.executable, "-m", "homing.cli", "bench", "frontend", *flags.split()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, process.stderr
    plain, streamed, added, long_prompt = json.loads(process.stdout)["results"]
    for result in (plain, streamed):
        assert result["requests_per_cpu_s"] > 0
        assert result["bare_app"]["requests_per_cpu_s"] > 0
    assert streamed["events_per_cpu_s"] > 8 * streamed["requests_per_cpu_s"], "and [DONE]"
    assert added["over_http_p50_ms"] > 0
    assert added["without_http_p50_ms"] > 0
    assert added["bare_app_p50_ms"] > 0
    assert len(long_prompt["longest_gaps_ms"]) == len(long_prompt["calm_gaps_ms"]) == 1
