"""Which parsers an answer needs: by name, or recognised from the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from homing.errors import ConfigError
from homing.frontend.parsers.constrained import NamedCallParser, RequiredCallsParser
from homing.frontend.parsers.events import Content, Event, Parser, PlainText
from homing.frontend.parsers.hermes import hermes
from homing.frontend.parsers.llama3_json import llama3_json
from homing.frontend.parsers.mistral import mistral
from homing.frontend.parsers.qwen3_coder import qwen3_coder
from homing.frontend.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from homing.frontend.parsers.tool_calls import ToolCallParser, ToolFormat
from homing.frontend.parsers.tool_choice import ToolChoice, ToolChoiceMode
from homing.frontend.parsers.tools import Tool

TOOL_FORMATS: dict[str, Callable[[Sequence[Tool]], ToolFormat]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
}
"""Name -> how calls of a request with these tools are written."""

_TOOL_SIGNS = [
    ("<arg_key>", None),  # GLM: the tags of Hermes, with other things inside
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
]
"""What only that family's chat templates contain, the most telling first."""

_REASONING_SIGNS = [
    ("</think>", "qwen3"),
    ("<think>", "qwen3"),
    ("[/THINK]", "magistral"),
    ("</seed:think>", "seed_oss"),
]


@dataclass(frozen=True)
class AnswerFormat:
    """How one model marks tool calls and reasoning. Names of formats; None: it does not."""

    tools: str | None
    reasoning: str | None

    @property
    def needs_special_tokens(self) -> bool:
        """Whether its marks are special tokens, which must not be left out of the text."""
        return self.tools == "mistral" or self.reasoning == "magistral"

    @property
    def without_reasoning(self) -> AnswerFormat:
        return AnswerFormat(self.tools, None)

    def parser(self, choice: ToolChoice, *, prompt_end: str = "") -> AnswerParser:
        """A parser of one answer. `prompt_end`: the rendered prompt, or its last 64 characters."""
        thoughts = None
        if self.reasoning is not None:
            thoughts = ReasoningParser(REASONING_FORMATS[self.reasoning], prompt_end=prompt_end)
        return AnswerParser(thoughts, self._content_parser(choice))

    def _content_parser(self, choice: ToolChoice) -> Parser:
        match choice.mode:
            case ToolChoiceMode.NAMED:
                return NamedCallParser(choice.tools[0].name)
            case ToolChoiceMode.REQUIRED:
                return RequiredCallsParser()
            case ToolChoiceMode.AUTO if choice.tools and self.tools is not None:
                tool_format = TOOL_FORMATS[self.tools](choice.tools)
                return ToolCallParser(tool_format, parallel=choice.parallel)
            case _:
                return PlainText()


class AnswerParser:
    """Reasoning first; what is no reasoning may hold tool calls."""

    def __init__(self, thoughts: ReasoningParser | None, content: Parser) -> None:
        self._thoughts = thoughts
        self._content = content

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is a thought."""
        return self._thoughts is not None and self._thoughts.is_reasoning

    def push(self, text: str) -> list[Event]:
        if self._thoughts is None:
            return self._content.push(text)
        return self._find_calls(self._thoughts.push(text))

    def finish(self) -> list[Event]:
        held = self._find_calls(self._thoughts.finish()) if self._thoughts else []
        return held + self._content.finish()

    def _find_calls(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._content.push(event.text) if isinstance(event, Content) else [event]
        return found


def answer_format(
    chat_template: str | None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> AnswerFormat:
    """The format with these names; 'none' is none, and None looks for signs in the template.

    Raises `ConfigError` for a name that there is not.
    """
    return AnswerFormat(
        _choose("tool call parser", tool_call_parser, TOOL_FORMATS, chat_template, _TOOL_SIGNS),
        _choose(
            "reasoning parser", reasoning_parser, REASONING_FORMATS, chat_template, _REASONING_SIGNS
        ),
    )


def _choose(
    kind: str,
    name: str | None,
    formats: Iterable[str],
    chat_template: str | None,
    signs: Sequence[tuple[str, str | None]],
) -> str | None:
    if name is None:
        return next((family for sign, family in signs if sign in (chat_template or "")), None)
    if name == "none":
        return None
    if name not in formats:
        raise ConfigError(f"no {kind} is named {name!r}; there are: none, {', '.join(formats)}")
    return name
