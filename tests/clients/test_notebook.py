"""`homing.llm` in the cells of a real Jupyter kernel, which runs an event loop of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

SETTINGS = {"buffer_size_gb": 0.02, "max_requests": 8, "dtype": "fp32", "num_threads": 1}
CELLS = (
    "from homing.llm import LLM, AsyncLLM, EngineConfig, SamplingParams",
    "greedy = SamplingParams(temperature=0, num_tokens_to_generate=4)",
    "llm = LLM(MODEL, engine_config=CONFIG, use_coordinator=True)",
    "print(llm.generate([5, 6, 7], greedy, progress=True)[0].generated_tokens)",
    "llm.shutdown()",
    "beside = AsyncLLM(MODEL, engine_config=CONFIG)",
    "print((await beside.generate([5, 6, 7], greedy, progress=True)).generated_tokens)",
    "print([delta.tokens async for delta in beside.stream([5, 6, 7], greedy)])",
    "await beside.shutdown()",
)


def test_cells_generate_await_and_stream(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    notebook = nbformat.v4.new_notebook()
    settings = f"MODEL, CONFIG = {str(model)!r}, EngineConfig(**{SETTINGS!r})"
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in (CELLS[0], settings, *CELLS[1:])]
    nbclient.NotebookClient(notebook, timeout=90).execute()  # raises what a cell raises
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.outputs
        if output.get("name") == "stdout"
    )
    first, second, *streamed = re.findall(r"\[[\d, ]+\]", printed)
    assert first == second
    tokens = [int(token) for part in streamed for token in re.findall(r"\d+", part)]
    assert str(tokens) == first
