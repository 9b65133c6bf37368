"""What a chat request says of tools, and the shape that this gives the answer."""

from __future__ import annotations

import msgspec

from homing.errors import InvalidRequest
from homing.frontend.openai.requests import ChatRequest
from homing.frontend.openai.structured import structured_output
from homing.frontend.parsers import ToolChoice, ToolChoiceMode, read_tool_choice, read_tools
from homing.params import JsonSchema, StructuredOutput


def tool_choice(request: ChatRequest) -> ToolChoice:
    """Raises `InvalidRequest` naming the client's field."""
    tools = read_tools(request.tools)
    return read_tool_choice(request.tool_choice, tools, parallel=request.parallel_tool_calls)


def tools_structure(request: ChatRequest, choice: ToolChoice) -> StructuredOutput | None:
    """The shape that is asked for, or that a required call has. Raises `InvalidRequest` for both:
    an answer of one shape is no call."""
    shape = structured_output(request)
    can_call = bool(choice.tools) and choice.mode is not ToolChoiceMode.NONE
    if shape is not None and can_call:
        raise InvalidRequest(
            "an answer of a given shape cannot call tools: give tool_choice 'none', or no shape",
            field="tool_choice",
        )
    schema = choice.output_schema
    return shape if schema is None else JsonSchema(msgspec.json.encode(schema).decode())
