"""lm_eval's `local-completions` against a real server: what it measures over HTTP, with prompts of
token ids, is what transformers computes. Skipped where lm_eval is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from homing.tokenizer import Tokenizer
from tests.support.backends import demo_files
from tests.support.reference import greedy_tokens, reference_model
from tests.support.serving import serving

pytestmark = [
    pytest.mark.skipif(not find_spec("lm_eval"), reason="lm_eval is not here: see `make clients`"),
    pytest.mark.timeout(600),
]

TASKS = Path(__file__).parent / "lm_eval_tasks"
FACTS = [json.loads(line) for line in (TASKS / "facts.jsonl").read_text().splitlines()]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def directory() -> Path:
    return demo_files().directory


@pytest.fixture(scope="module")
def samples(directory, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Task -> what lm_eval recorded of each item."""
    output = tmp_path_factory.mktemp("lm_eval")
    with serving("--dtype", "fp32", "--kv-cache-gb", "0.5", "--frontend-replicas", "1") as server:
        run_lm_eval(f"{server.base_url}/v1/completions", directory, output)
    return {
        task: [
            json.loads(line)
            for path in output.rglob(f"samples_{task}_*.jsonl")
            for line in path.read_text().splitlines()
        ]
        for task in ("facts_choices", "facts_rolling", "facts_continued")
    }


def run_lm_eval(url: str, tokenizer: Path, output: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "cache")}
    model = f"base_url={url},tokenizer={tokenizer},num_concurrent=4,max_retries=1"
    arguments = ["--model", "local-completions", "--model_args", model, "--include_path", "."]
    tasks = ["--tasks", "facts_choices,facts_rolling,facts_continued"]
    recorded = ["--output_path", str(output), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *arguments, *tasks, *recorded],
        cwd=TASKS,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def log_likelihood(directory: Path, ids: list[int], start: int) -> tuple[float, bool]:
    """Of the ids from `start` on, and whether each is the most probable, by transformers."""
    import torch

    with torch.no_grad():
        logits = reference_model(directory)(torch.tensor([ids])).logits[0]
    scores = torch.log_softmax(logits[start - 1 : -1].double(), dim=-1)
    chosen = torch.tensor(ids[start:])
    of_chosen = scores.gather(1, chosen[:, None]).sum().item()
    return of_chosen, bool((scores.argmax(dim=-1) == chosen).all())


def test_log_likelihoods_are_those_of_transformers(samples, directory):
    tokenizer = Tokenizer.from_dir(directory)
    assert len(samples["facts_choices"]) == len(FACTS)
    for sample in samples["facts_choices"]:
        question = sample["doc"]["question"]
        for choice, [measured, is_greedy] in zip(
            sample["doc"]["choices"], sample["filtered_resps"], strict=True
        ):
            ids = tokenizer.encode(question + choice)
            start = len(tokenizer.encode(question))
            expected, most_probable = log_likelihood(directory, ids, start)
            assert float(measured) == pytest.approx(expected, abs=1e-3)
            assert (str(is_greedy) == "True") == most_probable


def test_rolling_log_likelihoods_are_those_of_transformers(samples, directory):
    tokenizer = Tokenizer.from_dir(directory)
    assert len(samples["facts_rolling"]) == len(FACTS)
    for sample in samples["facts_rolling"]:
        ids = tokenizer.encode(sample["target"])
        assert tokenizer.bos_token_id is not None  # lm_eval's prompts begin with it
        expected, _ = log_likelihood(directory, [tokenizer.bos_token_id, *ids], 1)
        [measured] = sample["filtered_resps"]
        assert float(measured) == pytest.approx(expected, abs=1e-3)


def test_generated_texts_are_those_of_transformers(samples, directory):
    tokenizer = Tokenizer.from_dir(directory)
    assert len(samples["facts_continued"]) == len(FACTS)
    for sample in samples["facts_continued"]:
        ids = greedy_tokens(directory, tokenizer.encode(sample["doc"]["question"]), NUM_TOKENS)
        assert sample["filtered_resps"] == [tokenizer.decode(ids).split("\n")[0]]
