"""Tools of models whose chat template has none: shown, called, forced and answered as text, exact over turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import TOOLS, Talk, parsed
from toy_templates import CHATML, HEADED, LLAMA, PLAIN, SHOWS_TOOLS, THINKING

from agentlightning.errors import ModelError
from agentlightning.rendering.completion_parser import Syntax
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.grammar import make_grammar
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer
from agentlightning.rendering.tool_template import SYNTAXES

Message = dict[str, Any]
Maker = Callable[..., Renderer]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""
LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set before = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system != false else '' %}
        {{- bos_token + '[INST] ' + before + message['content'].strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
PARTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""In the manner of models with sight: content is a list."""

WITHOUT: dict[str, tuple[str, str]] = {
    "smollm2": (SMOLLM2, "<|im_end|>"),
    "gemma2": (GEMMA2, "<|im_end|>"),
    "llama2": (LLAMA2, "<|endoftext|>"),
    "chatml": (CHATML, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "plain": (PLAIN, "<|end|>"),
    "no closing": (HEADED, "<|endoftext|>"),
    "parts": (PARTS, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
}
"""Templates without tools, and the tokens that end their messages."""

CALLS: dict[Syntax, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": %s}}\n</tool_call>',
    "tags": "<tool_call>\n<function=f>\n<parameter=n>\n%s\n</parameter>\n</function>\n</tool_call>",
    "pairs": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "bare": '{"name": "f", "parameters": {"n": %s}}',
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "what is it?"}


def call(arguments: str, call_id: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(call_id: str, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def written(renderer: Renderer, messages: list[Message], tools: list[Message] | None = TOOLS) -> str:
    return renderer.render(RequestView.of(messages, tools).normal, tools, generate=True)


@pytest.fixture(scope="module", params=WITHOUT)
def renderer(request: pytest.FixtureRequest, make_renderer: Maker) -> Renderer:
    return make_renderer(*WITHOUT[request.param])


def test_tools_calls_and_results_are_written_whatever_the_template_knows(renderer: Renderer) -> None:
    history = [
        SYSTEM,
        USER,
        {"role": "assistant", "tool_calls": [call('{"n": 1}', "a"), call("", "b")]},  # content absent
        result("b", "second"),
        result("a", [{"type": "text", "text": "first"}]),
        {"role": "user", "content": "and then?"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"n": 2}', "c")]},
        result("c", "third"),
    ]
    text = written(renderer, history)
    assert renderer.tool_text == "hermes"
    order = ["Be brief.", json.dumps(TOOLS[0]), "\n</tools>", USER["content"], CALLS["hermes"] % 1, '"arguments": {}}']
    order += ["<tool_response>\nfirst\n</tool_response>", "second", "and then?", CALLS["hermes"] % 2, "third"]
    places = [text.index(one) for one in order]
    assert places == sorted(places)
    assert "first" in written(renderer, history, None), "a history with calls, and no tools any more"


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("name", WITHOUT)
def test_turns_with_calls_are_exact_and_read_back_in_every_syntax(
    name: str, syntax: Syntax, make_renderer: Maker
) -> None:
    source, end = WITHOUT[name]
    taught = make_renderer(source, end, tool_syntax=syntax)
    talk = Talk(taught, TOOLS, [SYSTEM, USER])
    several = 1 if syntax == "bare" else 2
    talk.turn(
        "".join(CALLS[syntax] % number for number in range(several))
    )  # no line break: not as the template writes it
    made = talk.messages[-1]["tool_calls"]
    assert [json.loads(one["function"]["arguments"]) for one in made] == [{"n": number} for number in range(several)]
    talk.messages += [result(one["id"], f"got {at}") for at, one in reversed(list(enumerate(made)))]
    if syntax != "bare":
        talk.turn("Hm. " + CALLS[syntax] % "-7")
        assert talk.messages[-1]["content"] == "Hm."
        talk.messages.append(result(talk.messages[-1]["tool_calls"][0]["id"], ""))
    talk.turn("It is so.")
    talk.messages.append({"role": "user", "content": "and?"})
    plan = talk.turn("yes")
    assert [one.fork_cause for one in talk.plans] == [None] * len(talk.plans)
    assert all(one.parent is not None for one in talk.plans[1:])
    assert plan.prompt_ids[: len(talk.whole["0"])] == talk.whole["0"]
    again = Conversation(taught, talk.calls[:-1]).plan(RequestView.of(talk.messages[:-1], TOOLS))
    assert (again.fork_cause, again.prompt_ids) == (None, plan.prompt_ids)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_call_can_be_forced_in_every_syntax(syntax: Syntax, make_renderer: Maker) -> None:
    taught = make_renderer(SMOLLM2, tool_syntax=syntax)
    prompt = written(taught, [USER])
    wanted = {"required": True, "names": ["f"], "field": "tool_choice"}
    spec = make_grammar({"tool_call": wanted}, TOOLS, taught.grammar_model, prompt=prompt)
    ids = [*taught.encode(CALLS[syntax] % 5), next(iter(taught.end_ids))]
    assert len(taught.grammars.masks(spec, ids)) == len(ids)
    assert parsed(taught.parser, CALLS[syntax] % 5, prompt, TOOLS).tool_calls[0][0] == "f"


def test_a_template_that_refuses_system_messages_has_them_before_the_users_words(make_renderer: Maker) -> None:
    text = written(make_renderer(GEMMA2), [SYSTEM, USER], None)
    assert text.endswith("<|im_start|>user\nBe brief.\n\nwhat is it?<|im_end|>\n<|im_start|>model\n")


def test_a_template_with_tools_keeps_its_own_unless_a_syntax_is_chosen(make_renderer: Maker) -> None:
    own = make_renderer(SHOWS_TOOLS + CHATML)
    assert (own.tool_text, own.parser.syntax) == (None, None)
    chosen = make_renderer(SHOWS_TOOLS + CHATML, tool_syntax="pairs")
    assert (chosen.tool_text, chosen.parser.syntax) == ("pairs", "pairs")
    assert written(chosen, [USER]).startswith("<|im_start|>system\n# Tools")


def test_the_template_of_an_export_is_the_same_where_it_is_loaded_again(make_renderer: Maker) -> None:
    first = make_renderer(GEMMA2, tool_syntax="tags")
    second = make_renderer(first.chat_template)
    assert (second.tool_text, second.chat_template) == ("tags", None)
    assert written(second, [SYSTEM, USER]) == written(first, [SYSTEM, USER])


def test_a_model_without_a_chat_template_takes_a_built_in_one_or_a_file(make_renderer: Maker, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"put a chat_template.jinja into .*--chat-template chatml"):
        make_renderer(None)
    text = "<|im_start|>user\nwhat is it?<|endoftext|>\n<|im_start|>assistant\n"
    assert written(make_renderer(None, "<|endoftext|>", chat_template="chatml"), [USER], None) == text
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN, encoding="utf-8")
    assert written(make_renderer(CHATML, chat_template=str(file)), [USER], None).startswith("<|user|>what")
    with pytest.raises(ModelError, match=r"model.chat_template: expected chatml or a file, got 'chatmi'"):
        make_renderer(CHATML, chat_template="chatmi")
