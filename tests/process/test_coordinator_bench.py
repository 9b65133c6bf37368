"""`homing bench coordinator`, briefly."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_bench_prints_one_json_object_with_a_result_for_each_size() -> None:
    flags = "--ranks 2 --clients 1 --prompt-tokens 128,2048 --index-entries 500 --seconds 0.5"
    flags += " --rounds 1"
    command = [sys.executable, "-m", "homing.cli", "bench", "coordinator", *flags.split()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["index_entries_at_start"] == 500
    assert [result["prompt_tokens"] for result in report["results"]] == [128, 2048]
    for result in report["results"]:
        assert result["requests_per_s"] > 0
        assert result["cpu_us_per_request"] >= result["cpu_us_per_output"]
        assert result["bare_router_cpu_us"] > 0
        assert "submission_cpu_us" in result
