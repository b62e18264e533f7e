"""Rendered prompts equal those of transformers' apply_chat_template, for templates in the styles that models ship."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from triblade.models.chat_template import ChatTemplate

SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- (prefix if loop.first else "") -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
QWEN = """{%- set ns = namespace(last=messages|length - 1, tool=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last == messages|length - 1 %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {"smollm": SMOLLM, "gemma": GEMMA, "llama3": LLAMA3, "qwen": QWEN}
USER, ANSWER = {"role": "user", "content": " Wie geht's? 你好 <b>&</b> "}, {"role": "assistant", "content": "Fine.\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "And\n\nnow?"}],
    "system": [{"role": "system", "content": "Be brief. "}, USER],
    "empty": [{"role": "user", "content": ""}],
    "thought": [USER, {"role": "assistant", "content": "<think>hm</think>\n\nYes"}, USER],
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def oracle() -> Any:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "date_string": "1 Jan 1970"}])
def test_prompts_equal_transformers(name: str, chat: str, variables: dict[str, Any], oracle: Any) -> None:
    for add in (True, False):
        options = {"add_generation_prompt": add, **variables}
        expected = oracle.apply_chat_template(CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, **options)
        assert ChatTemplate(TEMPLATES[name]).render(CHATS[chat], SPECIAL | options) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["The answer", "The answer is ", "Line\n", "  x"])
def test_continued_messages_equal_transformers(name: str, text: str, oracle: Any) -> None:
    chat = [USER, {"role": "assistant", "content": text}]
    expected = oracle.apply_chat_template(
        chat, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    assert ChatTemplate(TEMPLATES[name]).render_open(chat, SPECIAL) == expected


def test_tools_and_tool_calls_equal_transformers(oracle: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "Näh <&>", "parameters": {}}}]
    function = {"name": "f", "arguments": {"x": [1, "é"], "y": None}}
    chat = [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    expected = oracle.apply_chat_template(chat, chat_template=LLAMA3, tools=tools, tokenize=False)
    assert ChatTemplate(LLAMA3).render(chat, SPECIAL | {"tools": tools, "add_generation_prompt": False}) == expected
