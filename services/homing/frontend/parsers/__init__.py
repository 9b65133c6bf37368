"""What a model's answer means: content, reasoning and tool calls, found as the text arrives.

Pure text in, events out: nothing here knows of HTTP, tokens or models. Also what goes the other
way: what a request lets the model call, and its messages as chat templates read them.
"""

from homing.frontend.parsers.answer_or_calls import answer_or_calls
from homing.frontend.parsers.choose import AnswerFormat, AnswerParser, answer_format
from homing.frontend.parsers.events import (
    Content,
    Event,
    Parser,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from homing.frontend.parsers.openai_message import delta, message
from homing.frontend.parsers.template_messages import template_messages
from homing.frontend.parsers.tool_choice import ToolChoice, ToolChoiceMode, read_tool_choice
from homing.frontend.parsers.tools import Tool, read_tools

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "Content",
    "Event",
    "Parser",
    "Reasoning",
    "Tool",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "ToolChoiceMode",
    "answer_format",
    "answer_or_calls",
    "delta",
    "message",
    "read_tool_choice",
    "read_tools",
    "template_messages",
]
