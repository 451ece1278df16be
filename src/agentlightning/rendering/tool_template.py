"""Tools as text: a chat template that knows no tools, made one that does.

Driven by the renderer, which finds out what a template lacks. The result is a chat template like any other: transformers and
vLLM write the same from the trained model's folder, and `completion_parser` reads what it writes. Pure; knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from agentlightning.rendering.completion_parser import CLOSE, OPEN, Syntax

SYNTAXES: tuple[Syntax, ...] = get_args(Syntax)
_MARK = "{#- tools as text: %s -#}"

_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_CALLING: Mapping[Syntax, str] = MappingProxyType(
    {
        "hermes": "For each function call, return a json object with function name and arguments within "
        f"{OPEN}{CLOSE} XML tags:\n{OPEN}\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n'
        f"{CLOSE}",
        "tags": f"For each function call, reply in this format, with one parameter tag per argument:\n{OPEN}\n"
        f"<function=function-name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n{CLOSE}",
        "pairs": "For each function call, output the function name and arguments within the following XML format:\n"
        f"{OPEN}function-name\n<arg_key>name</arg_key>\n<arg_value>value</arg_value>\n{CLOSE}",
        "bare": "To call a function, reply with nothing but a json object with its name and arguments:\n"
        '{"name": <function-name>, "parameters": <args-json-object>}',
    }
)
_VALUE = "(value if value is string else value | tojson)"
_WHOLE = "(function.arguments if function.arguments is string else (function.arguments or {}) | tojson)"


def _add(*parts: str) -> str:
    """Jinja that adds expressions to the text of the calls."""
    return f"{{%- set plain.calls = plain.calls ~ {' ~ '.join(parts)} -%}}"


def _members(*parts: str) -> str:
    return f"{{%- for name, value in function.arguments.items() -%}}{_add(*parts)}{{%- endfor -%}}"


_CALLS: Mapping[Syntax, str] = MappingProxyType(
    {
        "hermes": _add(
            json.dumps(f'{OPEN}\n{{"name": '),
            "function.name | tojson",
            "', \"arguments\": '",
            _WHOLE,
            f"'}}\\n{CLOSE}'",
        ),
        "tags": _add(f"'{OPEN}\\n<function='", "function.name", r"'>\n'")
        + _members("'<parameter='", "name", r"'>\n'", _VALUE, r"'\n</parameter>\n'")
        + _add(f"'</function>\\n{CLOSE}'"),
        "pairs": _add(f"'{OPEN}'", "function.name", r"'\n'")
        + _members("'<arg_key>'", "name", r"'</arg_key>\n<arg_value>'", _VALUE, r"'</arg_value>\n'")
        + _add(f"'{CLOSE}'"),
        "bare": _add("'{\"name\": '", "function.name | tojson", "', \"parameters\": '", _WHOLE, "'}'"),
    }
)
"""Jinja that writes one call, as the templates do from which each syntax is known."""

_TEMPLATE = """\
{%- set plain = namespace(head='', messages=[], joins='', calls='') -%}
{%- if tools -%}
{%- for tool in tools -%}{%- set plain.head = plain.head ~ '\\n' ~ (tool | tojson) -%}{%- endfor -%}
{%- set plain.head = INTRODUCTION ~ plain.head ~ CALLING -%}
{%- endif -%}
{%- set first = 1 if messages and messages[0].role == 'system' else 0 -%}
{%- set head = [{'role': 'system', 'content': HEAD}] if plain.head else [] -%}
{%- for message in messages[:first] + head + messages[first:] -%}
{%- set role = ROLES.get(message.role, message.role) -%}
{%- set content = message.content if message.content else '' -%}
{%- if message.role == 'tool' -%}
{%- if content is string -%}
{%- set content = '<tool_response>\\n' ~ content ~ '\\n</tool_response>' -%}
{%- else -%}
{%- set content = [{'type': 'text', 'text': '<tool_response>\\n'}] + content + \
[{'type': 'text', 'text': '\\n</tool_response>'}] -%}
{%- endif -%}
{%- elif message.tool_calls -%}
{%- set plain.calls = content if content is string else content | map(attribute='text') | join -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function else call -%}
{%- set plain.calls = plain.calls ~ ('\\n' if plain.calls else '') -%}
CALL
{%- endfor -%}
{%- set content = plain.calls if content is string else [{'type': 'text', 'text': plain.calls}] -%}
{%- endif -%}
{%- set kept = message.items() | rejectattr(0, 'in', ['tool_calls', 'tool_call_id']) -%}
{%- if plain.joins and plain.messages[-1].role == role -%}
{%- set before = plain.messages[-1].content -%}
{%- if before is string and content is string -%}
{%- set content = before ~ plain.joins ~ content -%}
{%- else -%}
{%- set content = ([{'type': 'text', 'text': before}] if before is string else before) + \
[{'type': 'text', 'text': plain.joins}] + ([{'type': 'text', 'text': content}] if content is string else content) -%}
{%- endif -%}
{%- set plain.messages = plain.messages[:-1] + [dict(kept, role=role, content=content)] -%}
{%- elif message.role == 'tool' or message.tool_calls or role != message.role -%}
{%- set plain.messages = plain.messages + [dict(kept, role=role, content=content)] -%}
{%- else -%}
{%- set plain.messages = plain.messages + [message] -%}
{%- endif -%}
{%- set plain.joins = '\\n' if message.role == 'tool' else '\\n\\n' if message.role == 'system' and \
(role == 'user' or plain.head and first == 1 and loop.first) else '' -%}
{%- endfor -%}
{%- set messages = plain.messages -%}
{%- set tools = none %}
"""
"""The part before the model's own template, which gets texts alone. The results of calls are user messages, one for each
turn, with the user's own words after them: many templates know no other roles, and want them by turns."""


def with_tools(template: str, syntax: Syntax, roles: Mapping[str, str], takes_text: bool) -> str:
    """The chat template with tools written as text. `roles`: those that messages get in place of theirs, "user" for "tool",
    say. Contents are lists of parts, unless it `takes_text`."""
    before = _TEMPLATE.replace("CALL\n", _CALLS[syntax] + "\n").replace("ROLES", json.dumps(dict(roles)))
    before = before.replace("INTRODUCTION", json.dumps(_INTRODUCTION))
    before = before.replace("CALLING", json.dumps(f"\n</tools>\n\n{_CALLING[syntax]}"))
    before = before.replace("HEAD", "plain.head" if takes_text else "[{'type': 'text', 'text': plain.head}]")
    return _MARK % syntax + "\n" + before + template


def tools_as_text(template: str) -> Syntax | None:
    """The syntax in which `with_tools` made this template write tools; None where it did not."""
    return next((one for one in SYNTAXES if template.startswith(_MARK % one)), None)
