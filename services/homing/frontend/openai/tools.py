"""What a chat request says of tools, and the shape that this gives the answer."""

from __future__ import annotations

import msgspec

from homing.errors import InvalidRequest
from homing.frontend.openai.requests import ChatRequest
from homing.frontend.openai.structured import structured_output
from homing.frontend.parsers import (
    ToolChoice,
    ToolChoiceMode,
    answer_or_calls,
    read_tool_choice,
    read_tools,
)
from homing.params import Grammar, JsonSchema, StructuredOutput


def tool_choice(request: ChatRequest) -> ToolChoice:
    """Raises `InvalidRequest` naming the client's field."""
    tools = read_tools(request.tools)
    return read_tool_choice(request.tool_choice, tools, parallel=request.parallel_tool_calls)


def tools_structure(
    request: ChatRequest, choice: ToolChoice, tool_format: str | None
) -> StructuredOutput | None:
    """The shape that is asked for, or that a required call has: then there is no text to have the
    other. Where the model may call tools or not, the shape is of what it says if it does not.

    `tool_format`: how the model writes calls. Raises `InvalidRequest` for what cannot be had.
    """
    shape = structured_output(request)
    if (schema := choice.output_schema) is not None:
        return JsonSchema(msgspec.json.encode(schema).decode())
    if shape is None or not choice.tools or choice.mode is ToolChoiceMode.NONE:
        return shape
    both = None
    if isinstance(shape, JsonSchema):
        both = answer_or_calls(shape.schema, choice, tool_format)
    if both is None:
        raise InvalidRequest(
            "an answer of this shape, or of this model, cannot have tools to choose from: "
            "give tool_choice 'none', or no shape",
            field="tool_choice",
        )
    return Grammar(both)
