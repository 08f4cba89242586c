"""Chat templates in the style of five families of models. Together they read everything that a
message, a tool or a setting may have."""

from __future__ import annotations

QWEN = """
{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{{ turn('system', first ~ '\\n# Tools\\n' ~ (tools | tojson)) }}
{%- elif first %}{{ turn('system', first) }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ turn(m.role, m.content) }}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > last.user %}<think>
{{ m.reasoning_content.strip() }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA = """
{%- if tools %}<|start|>system<|end|>

{% for t in tools %}{{ t.function | tojson(indent=2) }}
{% endfor %}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}<|start|>assistant<|end|>

{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{
call.function.arguments | tojson }}}{% if not loop.last %}; {% endif %}{% endfor %}<|im_end|>
{%- elif m.role in ('tool', 'ipython') %}<|start|>ipython<|end|>

{{ m.content | tojson }}<|im_end|>
{%- else %}<|start|>{{ m.role }}{% if m.name %} name={{ m.name }}{% endif %}<|end|>

{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""

HERMES = """
{%- if tools %}<|im_start|>system
<tools>{% for t in tools %}{{ t | tojson }}
{% endfor %}</tools><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<tool_response>
{"name": "{{ m.name }}", "content": {{ m.content | tojson }}}
</tool_response>{% else %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

DEEPSEEK = """
{%- set thinks = thinking is defined and thinking %}
{%- for m in messages if m.role == 'system' %}{{ m.content }}
{% endfor %}
{%- for t in tools or [] %}### {{ t.function.name }}
{{ t.function.description }}
{{ t.function.parameters | tojson }}
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning is defined and m.reasoning is not none and loop.last %}<think>{{ m.reasoning }}
{%- endif %}</think>{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if loop.first %}<|calls|>{% endif %}<|call|>{{
call.function.name }}<|sep|>{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{%- elif m.role == 'tool' %}<|output|>{{ m.content }}<|output_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>
{%- if thinks %}<think>{% else %}</think>{% endif %}{% endif %}"""

KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_system|>{{ m.name or 'tool' }}<|im_middle|>## Return of {{
m.tool_call_id }}
{{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' %}<|im_assistant|>{{ m.name or 'assistant' }}<|im_middle|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<|call|>{{ call.id }}<|args|>{{
call.function.arguments | tojson }}{% endfor %}<|im_end|>
{%- else %}<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{{ m.content }}<|im_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

KNOWS_DEVELOPER = """
{%- for m in messages %}<|im_start|>
{%- if m.role == 'developer' %}developer {{ m.tools | tojson }}{% else %}{{ m.role }}{% endif %}
{{ m.content }}<|im_end|>
{% endfor %}"""

FAMILIES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "hermes": HERMES,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "developer": KNOWS_DEVELOPER,
}
