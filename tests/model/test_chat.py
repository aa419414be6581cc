"""Chat templates: rendered as published ones expect, failures in one line, and nothing of the process in reach."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from vkbackend.errors import ModelError
from vkbackend.model.chat import render

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <b>é & 'q'</b> "}]


def test_a_conversation() -> None:
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<b>é & 'q'</b><|im_end|>\n"
    assert render(MESSAGES, CHATML) == turns + "<|im_start|>assistant\n"
    assert render(MESSAGES, CHATML, add_generation_prompt=False) == turns
    assert render(MESSAGES, CHATML, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")


def test_tools_are_json_without_html_escapes() -> None:
    tools = [{"name": "f", "description": "a < b & 'c' é"}]
    first = render(MESSAGES, CHATML, tools=tools).splitlines()[1]
    assert first == json.dumps(tools, ensure_ascii=False) + "<|im_end|>"
    assert render([], "{{ {'a': [1]} | tojson(indent=2) }}") == '{\n  "a": [\n    1\n  ]\n}'


def test_blocks_leave_no_blank_lines_and_loops_can_be_left() -> None:
    template = "{% for m in messages %}\n {% if loop.last %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}\nend"
    assert render(MESSAGES, template) == "system\nend"


def test_marks_around_the_text() -> None:
    assert render([], "{{ bos_token }}x{{ eos_token }}", bos_token="<s>", eos_token="</s>") == "<s>x</s>"
    assert render([], "[{{ bos_token }}{{ eos_token }}]") == "[]"


def test_todays_date() -> None:
    year = render([], "{{ strftime_now('%Y') }}")
    assert int(year) - datetime.datetime.now().year in (0, -1)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nsystem  turn') }}", "TemplateError: no system turn"),
        ("a\n{% if %}", " at line 2: TemplateSyntaxError: "),
        ("{{ missing.field }}", "UndefinedError: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 3 }}", "TypeError: "),
        ("{{ undefined_helper('x') }}", "UndefinedError: "),
        ("{{ 'x' | no_such_filter }}", "no_such_filter"),
    ],
)
def test_failures_are_one_line(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.chat_template failed.*{re.escape(message)}") as caught:
        render(MESSAGES, template)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(template: str) -> None:
    with pytest.raises(ModelError, match="chat_template failed"):
        render(MESSAGES, template)


def test_a_template_can_not_change_what_it_is_given() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for template in ("{{ messages.append(1) }}", "{{ messages.clear() }}", "{{ messages[0].update(role='y') }}"):
        with pytest.raises(ModelError, match="SecurityError"):
            render(messages, template)
    assert messages == [{"role": "user", "content": "x"}]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS + "{% endfor %}", "it ran for more than 5 s"),
        ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
        ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
        ("{{ 'a' * 20000000 }}", "it wrote 20000000 characters; at most 16000000 are allowed"),
        ("{{ '{:>99999999999}'.format(1) }}", "MemoryError"),
        ("{{ 'x' | center(99999999999) }}", "MemoryError"),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "RecursionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_can_not_take_all_time_or_memory(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"chat_template failed: {message}") as caught:
        render(MESSAGES, template)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_nothing_of_this_process_reaches_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even through the folder it was started in."""
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert render([], "ok") == "ok"


def test_what_json_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="must be as JSON has them: a value is of type object"):
        render([{"role": object()}], "x")


def test_any_text_reaches_the_template_and_comes_back() -> None:
    for text in ("\x00\n\r\x1b", "\ud800", "\u2028", "\U0010ffff", "{{ 1 }}{% raw %}"):
        assert render([{"content": text}], "{{ messages[0].content }}") == text
