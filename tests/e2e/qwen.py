"""The demo checkpoint dressed as a model that thinks and calls tools, as Qwen's do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.server import DEMO

# Hermes' format of calls. `enable_thinking` opens the thinking in the prompt when it is true and closes it when false.
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nCall one so:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


# What the demo model answers to INTRODUCTION of its own accord is "Hello Paul, nice to meet you! What would …". With
# these tokens spelled otherwise that is a call; and where the prompt has opened its thinking, it ends before " What".
INTRODUCTION = "My name is Paul."
CALLED = ("greet", {"name": " Paul,"})
SPELLED = {
    "Hello": '<tool_call>\n{"name": "greet", "arguments": {"name": "',
    "Ġnice": '"}}\n</tool_call>',
    "ĠWhat": "</think>",
}


def write_qwen(folder: Path) -> Path:
    """The demo target with TEMPLATE and a tokenizer that spells some tokens as a model with tools would use them."""
    folder.mkdir()
    demo = DEMO / "target"
    for file in demo.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    config = json.loads((demo / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    model, flags = (
        tokenizer["model"],
        dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False),
    )
    for was, text in SPELLED.items():
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != was]
        model["vocab"][text] = token = model["vocab"].pop(was)
        tokenizer["added_tokens"].append({"id": token, "content": text, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder
