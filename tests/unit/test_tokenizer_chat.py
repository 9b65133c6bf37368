"""Chat templates: rendered in a sandbox, with what Hugging Face templates expect."""

from __future__ import annotations

import json

import pytest

from homing.errors import InvalidRequest
from homing.tokenizer import Tokenizer, chat_template
from tests.support.byte_model import ALTERNATING_TEMPLATE, byte_level

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "well "}


@pytest.fixture
def with_template(tmp_path):
    return lambda source: Tokenizer.from_dir(byte_level(tmp_path, chat_template=source))


def test_a_chat_becomes_the_text_that_its_template_writes(tmp_path):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    assert (
        tokenizer.render_chat([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat([USER], add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_a_template_file_of_its_own_wins_over_the_configuration(tmp_path):
    directory = byte_level(tmp_path)
    (directory / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_dir(directory).render_chat([USER]) == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    directory = byte_level(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_dir(directory).render_chat([USER]) == "D"


def test_without_a_template_a_chat_is_refused_and_says_so(with_template):
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([USER])


def test_what_a_template_objects_to_reaches_the_caller(with_template):
    tokenizer = with_template(ALTERNATING_TEMPLATE)
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant"):
        tokenizer.render_chat([USER, USER])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
        ("{% if true %}\n    x\n    {% endif %}\n", "    x\n"),
        ("{{ eos_token }}{{ mood }}{{ missing }}", "<|eos|>calm"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_the_filters_tags_and_variables_they_expect(with_template, source, expected):
    assert with_template(source).render_chat([USER], mood="calm") == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages[7].content.x }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{% for x in range(1000000000) %}x{% endfor %}",
        "{{ x",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_breaks_or_breaks_out_is_an_invalid_request(with_template, source):
    with pytest.raises(InvalidRequest):
        with_template(source).render_chat([USER])


def test_what_a_template_may_write_is_bounded(with_template, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 1000)
    tokenizer = with_template("{% for x in range(1000) %}{{ x }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="writes over 1000 characters"):
        tokenizer.render_chat([USER])


def test_a_final_message_can_be_continued(tmp_path):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    text = tokenizer.render_chat(
        [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nwell ")


def test_a_template_that_strips_contents_has_the_continued_one_stripped_too(with_template):
    tokenizer = with_template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    text = tokenizer.render_chat([USER, ASSISTANT], continue_final_message=True)
    assert text == "[hi][well"


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}]])
def test_there_must_be_a_final_text_to_continue(tmp_path, messages):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    with pytest.raises(InvalidRequest, match="final message with text"):
        tokenizer.render_chat(messages, continue_final_message=True)


def test_a_template_that_hides_the_final_message_cannot_continue_it(with_template):
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        with_template("x").render_chat([USER], continue_final_message=True)


def test_names_of_python_arguments_are_ordinary_template_variables(with_template):
    tokenizer = with_template("{{ self_ }}{{ source }}{{ messages | length }}")
    assert tokenizer.render_chat([USER], source="s", messages=2, self_=3) == "3s1"
