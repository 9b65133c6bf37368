"""The shape that an answer must have: a JSON schema, a pattern, one of some texts, or a grammar.

Checked here for what costs nothing: that it is there, is not too long, and that a schema is JSON.
Whether it can be honoured is known once an engine has compiled it. Crosses the wire as a msgpack
map inside `SamplingParams`, told apart by its field `type`.
"""

from __future__ import annotations

import msgspec

from homing.errors import InvalidRequest

MAX_CHARACTERS = 128 * 1024
"""Of one definition. OpenAI takes 120,000 in a schema's names and values."""
JSON_WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,8}"
"""What may stand between the parts of a JSON text: a space, or a line break and an indent. Bounded:
weak models go on with blanks for ever. A schema may name its own, as `whitespace_pattern` in
`x-guidance`."""


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The answer is JSON that fits a schema."""

    schema: str
    """JSON text of the schema (draft 2020-12). `{"type": "object"}` asks for any object."""

    def __post_init__(self) -> None:
        _check_length(self.schema)
        try:
            msgspec.json.decode(self.schema, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise invalid(f"the JSON schema is not a JSON object: {error}") from error


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole answer matches a regular expression."""

    pattern: str
    """In the syntax of Rust's `regex`: neither look-around nor back-references."""

    def __post_init__(self) -> None:
        _check_length(self.pattern)


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """The answer is one of these texts."""

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not all(self.choices):
            raise invalid("a choice is empty")
        _check_length("".join(self.choices))


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """The answer is a sentence of a context-free grammar."""

    text: str
    """Lark (its first rule is `start`), or GBNF (`root ::= ...`)."""

    def __post_init__(self) -> None:
        _check_length(self.text)


StructuredOutput = JsonSchema | Regex | Choice | Grammar


def _check_length(definition: str) -> None:
    if not 0 < len(definition) <= MAX_CHARACTERS:
        raise invalid(
            f"the definition has {len(definition):,} characters; it must have from 1 to "
            f"{MAX_CHARACTERS:,}"
        )


def invalid(message: str) -> InvalidRequest:
    """The error for a definition that cannot be honoured."""
    return InvalidRequest(f"structured output: {message}", field="structured_output")
