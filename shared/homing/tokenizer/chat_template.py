"""Chat templates: a model's own Jinja program that turns messages into one prompt text.

A template comes with a model and is not trusted: it runs in Jinja's immutable sandbox, and what it
may write is bounded. Filters, globals and tags are those that Hugging Face templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from homing.errors import InvalidRequest

MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024
"""Twice the largest HTTP body that a frontend takes: templates add little to their messages."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; here, plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as Hugging Face has it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not been trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # jinja2 leaves these two dictionaries untyped.
    environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
    environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
        raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return environment


class ChatTemplate:
    """One model's template, compiled."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        """`special_tokens`: variables such as `bos_token`. Raises `InvalidRequest` if the source is
        not a template."""
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """The prompt's text. Raises `InvalidRequest` with whatever the template objects to."""
        if continue_final_message:
            messages = _mark_end(messages)
        context = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(lambda: self._template.generate(context))
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, generate: Callable[[], Iterable[str]]) -> str:
        pieces: list[str] = []
        room = MAX_RENDERED_CHARACTERS
        try:
            for piece in generate():
                room -= len(piece)
                if room < 0:
                    raise jinja2.TemplateError(
                        f"it writes over {MAX_RENDERED_CHARACTERS} characters"
                    )
                pieces.append(piece)
        except Exception as error:
            # Not narrower: templates index, add and call what clients sent, so any type of error
            # means that messages and template do not fit.
            raise InvalidRequest(f"chat template: {error}", field="messages") from error
        return "".join(pieces)


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's content."""
    last = messages[-1] if messages else {}
    if not isinstance(last.get("content"), str):
        raise InvalidRequest(
            "continue_final_message needs a final message with text", field="messages"
        )
    return [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    """The text up to the mark. A template that strips contents took the mark's space with it, and
    would have stripped the content's own."""
    position = text.rfind(_CONTINUE_MARK.strip())
    if position < 0:
        raise InvalidRequest(
            "the chat template does not show the final message, so it cannot be continued",
            field="continue_final_message",
        )
    stripped = not text.startswith(_CONTINUE_MARK, position)
    return text[:position].rstrip() if stripped else text[:position]
