"""Thoughts before an answer, wherever they were opened."""

from __future__ import annotations

import pytest

from homing.errors import ConfigError
from homing.frontend.parsers import Content, Reasoning, answer_format, read_tool_choice
from tests.support.answers import WEATHER, calls, parse

FREE = read_tool_choice(None, [])


def answer(name: str, prompt_end: str, text: str):
    return parse(
        answer_format(None, reasoning_parser=name).parser(FREE, prompt_end=prompt_end), [text]
    )


@pytest.mark.parametrize(
    ("name", "prompt_end", "text"),
    [
        ("qwen3", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\n42"),
        ("qwen3", "<|im_start|>assistant\n", "\n<think>Hm.</think>42"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\n42"),
        ("deepseek_r1", "<|Assistant|><think>\n", "Hm.\n</think>\n\n42"),
        ("deepseek_r1", "<|Assistant|>", "Hm.\n</think>\n\n42"),
        ("deepseek_r1", "<|Assistant|>", "<think>\nHm.\n</think>\n\n42"),
        ("magistral", "[/INST]", "[THINK]Hm.[/THINK]42"),
        ("seed_oss", "<seed:bos>assistant\n", "<seed:think>Hm.</seed:think>42"),
    ],
)
def test_thoughts_and_answer_are_parted_without_the_marks(name, prompt_end, text):
    assert answer(name, prompt_end, text) == [Reasoning("Hm."), Content("42")]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_prompt_that_closed_the_thoughts_prevents_them(name):
    assert answer(name, "<think>\n\n</think>\n\n", "42 </think>") == [Content("42 </think>")]


def test_an_answer_that_ends_while_thinking_is_all_thought():
    assert answer("qwen3", "<think>\n", "Hm. </thi") == [Reasoning("Hm. </thi")]


def test_only_a_thought_that_comes_first_is_one():
    text = "See <think>here</think>.\n"
    assert answer("qwen3", "", text) == [Content(text)]


def test_a_call_in_the_thoughts_is_a_thought_and_one_in_the_answer_is_a_call():
    form = answer_format(None, tool_call_parser="hermes", reasoning_parser="qwen3")
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    parser = form.parser(read_tool_choice("auto", [WEATHER]))
    assert parse(parser, [f"<think>{call}</think>\n\n{call}"]) == [
        Reasoning(call),
        *calls(("get_weather", "{}")),
    ]


def test_a_constrained_answer_may_be_thought_about():
    form = answer_format(None, reasoning_parser="qwen3")
    choice = read_tool_choice({"function": {"name": "get_weather"}}, [WEATHER])
    assert parse(form.parser(choice, prompt_end="<think>\n"), ["Hm.\n</think>\n\n{}"]) == [
        Reasoning("Hm."),
        *calls(("get_weather", "{}")),
    ]


def test_a_budget_can_count_the_thoughts():
    parser = answer_format(None, reasoning_parser="qwen3").parser(FREE, prompt_end="<think>")
    states = []
    for piece in ("", "Hm", ".", "</think>", "\n", "42"):
        parser.push(piece)
        states.append(parser.is_reasoning)
    assert states == [True, True, True, False, False, False]
    assert not answer_format(None).parser(FREE, prompt_end="<think>").is_reasoning


HERMES = "{{ tool }} <tool_call>\n{...}</tool_call>"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, None, None),
        ("<|im_start|>{{ message.content }}", None, None),
        (HERMES, "hermes", None),
        (HERMES + "<think>\\n\\n</think>", "hermes", "qwen3"),
        (HERMES + "<function=f><parameter=p>", "qwen3_coder", None),
        (HERMES + "<arg_key>", None, None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "magistral"),
        ("<|python_tag|>", "llama3_json", None),
        ("<|Assistant|><think>\\n", None, "qwen3"),
        ("<seed:think></seed:think>", None, "seed_oss"),
    ],
)
def test_a_template_tells_which_parsers_its_model_needs(template, tools, reasoning):
    form = answer_format(template)
    assert (form.tools, form.reasoning) == (tools, reasoning)
    assert form.needs_special_tokens == (tools == "mistral")


def test_a_name_wins_over_the_template_and_none_switches_off():
    form = answer_format(HERMES + "</think>", tool_call_parser="mistral", reasoning_parser="none")
    assert (form.tools, form.reasoning) == ("mistral", None)
    assert answer_format(HERMES, tool_call_parser="none").tools is None


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'pythonic'; there are: none, hermes, llama3_json"):
        answer_format(None, tool_call_parser="pythonic")
    with pytest.raises(ConfigError, match="reasoning parser is named"):
        answer_format(None, reasoning_parser="r2")
