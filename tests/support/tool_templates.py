"""Small chat templates that use the marks of published ones, one for each way of writing calls.

Ours, written for the tests; the marks are those of the families' model cards: ChatML with `<tools>`, `<tool_call>` and
`<tool_response>` (Hermes, Qwen), header ids and the role `ipython` (Llama 3), `[AVAILABLE_TOOLS]`, `[TOOL_CALLS]` and
`[TOOL_RESULTS]` (Mistral), and plain JSON.
"""

from __future__ import annotations

CHATML = """\
{%- if tools %}<|im_start|>system
Functions, in <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
To call one, write <tool_call>, {"name": ..., "arguments": ...} and </tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{%- macro begin(role) %}<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- if tools %}{{ begin("system") }}Answer with {"name": ..., "parameters": ...} to call one of these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- begin("assistant") }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}
{{- begin("ipython" if message.role == "tool" else message.role) }}{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ begin("assistant") }}{% endif %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids of calls have nine characters") }}{% endif %}
{{- "" if loop.first else ", " }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}
{%- endfor %}]</s>
{%- elif message.role == "tool" %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ " " + message.content }}</s>
{%- endif %}
{%- endfor %}"""

PLAIN = """\
{%- if tools %}Functions: {{ tools | tojson }}
Answer with {"name": ..., "arguments": ...} to call one.

{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}

{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

TEMPLATES = {"hermes": CHATML, "llama3_json": LLAMA3, "mistral": MISTRAL, "json": PLAIN}
