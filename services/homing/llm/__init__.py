"""The Python API. `LLM` for scripts, `AsyncLLM` for asyncio, `Engine` for those who step by hand.

    llm.py, async_llm.py   the two faces
    engine.py              an engine in this process
    fleet.py               coordinator, engine processes and their client
    answer.py              one answer as it grows: text, log-probabilities, result
    params.py, config.py   what a request and an engine may be told
    prompts.py, text.py    the forms of prompts; text to tokens and back
    model_files.py         models and tokenizers that are handed over built

`Engine` loads torch; nothing else here does until it computes in this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from homing.llm.async_llm import AsyncLLM
from homing.llm.config import EngineConfig, ServeConfig
from homing.llm.llm import LLM
from homing.llm.params import SamplingParams
from homing.llm.results import Delta, Result, Status

if TYPE_CHECKING:
    from homing.llm.engine import Engine

__all__ = [
    "LLM",
    "AsyncLLM",
    "Delta",
    "Engine",
    "EngineConfig",
    "Result",
    "SamplingParams",
    "ServeConfig",
    "Status",
]


def __getattr__(name: str) -> Any:
    """`Engine`, at its first use: it loads torch."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from homing.llm.engine import Engine

    return Engine
