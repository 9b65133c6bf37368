"""What one HTTP request asks the fleet to do, and what it takes to answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from homing.client import Client
from homing.frontend.answer_reader import AnswerReader, AnswerReading, Pieces
from homing.frontend.measures import Stopwatch
from homing.frontend.openai.requests import GenerationRequest
from homing.frontend.text import ChoiceText
from homing.frontend.thinking import ThinkingLimit
from homing.frontend.tokenizing import Prompt, TokenizerThread
from homing.params import SamplingParams
from homing.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """What the fleet is to do."""

    request: GenerationRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    reading: AnswerReading | None = None
    """Of a chat: how its answers are read."""
    skip_special_tokens: bool = True
    thinking: ThinkingLimit | None = None

    def choice(self, prompt: Prompt, tokenizer: Tokenizer) -> Pieces:
        """One choice's way from parts to pieces."""
        text = ChoiceText(
            tokenizer,
            prompt.token_ids,
            self.params,
            echo=prompt.text,
            skip_special_tokens=self.skip_special_tokens,
        )
        return text if self.reading is None else AnswerReader(text, self.reading)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request that generates, whatever it asks for."""

    client: Client
    tokenizer: Tokenizer
    thread: TokenizerThread
    stopwatch: Stopwatch
    request_id: str
    """What /abort knows its generations by, unless its body gives them names."""
    tenant: int | None
    """Whose API key it carries, if it needs one."""
