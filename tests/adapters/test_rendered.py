"""Recorded text as if this model had written it: held against the tokenizer's own rendering of whole conversations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import build
from agentlightning.adapters.rendered import rendered
from agentlightning.adapters.sequences import completion_rows
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import encode
from agentlightning.records import JSON, Call
from agentlightning.rendering.renderer import Renderer
from agentlightning.training_types import Trajectory

ASK = {"role": "user", "content": "Where does Ana live?"}
LOOK = {"role": "assistant", "content": "<find>Ana city</find>"}
FACT = {"role": "user", "content": "Oslo"}
TELL = {"role": "assistant", "content": "Completion: Oslo"}
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '<find>' + c.function.name + (c.function.arguments | tojson) + '</find>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

FORGETS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{{ m.reasoning_content + ' ' if m.reasoning_content and loop.last }}{{ m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Writes what was thought before the last answer, and not before earlier ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    texts = [message["content"] for message in (ASK, LOOK, FACT, TELL)] * 3
    tiny_model.train_tokenizer(texts, ("<find>", "</find>"), 400).save_pretrained(path)
    return path


def renderer_with(folder: Path, to: Path, template: str) -> Renderer:
    """The folder's tokenizer under another template."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "chat_template.jinja").write_text(template)
    return Renderer(to)


def call(name: str, messages: list[JSON], answer: JSON, parent: str | None = None, **fields: Any) -> Call:
    """A call of an external model, which has no tokens of ours."""
    tokens = {"suffix_ids": [], "sampled_ids": [], "versions": [], "policy": "", "messages": messages}
    return build.call(id=name, rollout_id="r", parent_id=parent, completion=answer, **{**tokens, **fields})


ROLLOUT = build.rollout("r")
TWO_TURNS = [call("a", [ASK], LOOK), call("b", [FACT], TELL, parent="a")]


def external(found: Call) -> bool:
    return not found.policy


def taught(calls: list[Call], renderer: Renderer) -> Trajectory:
    found = rendered(ROLLOUT, calls, renderer, external)
    assert isinstance(found, Trajectory), found
    return found


def test_a_conversation_is_one_row_of_exactly_what_the_template_writes(folder: Path) -> None:
    from transformers import AutoTokenizer

    (row,) = completion_rows(taught(TWO_TURNS, Renderer(folder)))
    tokens, mask = encode(AutoTokenizer.from_pretrained(folder), [ASK, LOOK, FACT, TELL])
    assert (row.tokens, row.mask) == (tokens, mask)


def test_an_answer_that_a_limit_cut_does_not_teach_to_end(folder: Path) -> None:
    renderer = Renderer(folder)
    whole, cut = (
        taught([call("a", [ASK], LOOK, finish_reason=reason)], renderer).transitions[0].sampled_ids
        for reason in ("stop", "length")
    )
    assert whole[:-1] == cut
    assert whole[-1] in renderer.end_ids


def test_an_abandoned_call_and_an_earlier_attempt_are_not_taught(folder: Path) -> None:
    calls = [call("a", [ASK], LOOK, finish_reason="abandoned"), call("b", [ASK], TELL)]
    (transition,) = taught(calls, Renderer(folder)).transitions
    assert transition.call_id == "b"
    assert isinstance(rendered(replace(ROLLOUT, attempt=2), calls, Renderer(folder), external), str)


def test_what_another_model_said_is_context(folder: Path) -> None:
    own = call("a", [ASK], LOOK, policy="default")
    teacher = call("b", [ASK, LOOK, FACT], TELL)
    (row,) = completion_rows(taught([own, teacher], Renderer(folder)))
    renderer = Renderer(folder)
    trained = [token for token, sampled in zip(row.tokens, row.mask, strict=True) if sampled]
    assert renderer.decode(trained) == "Completion: Oslo"
    assert "<find>Ana city</find>" in renderer.decode(row.tokens)


def test_a_tool_call_is_written_as_the_template_writes_it(folder: Path, tmp_path: Path) -> None:
    renderer = renderer_with(folder, tmp_path, WITH_TOOLS)
    function = {"name": "find", "arguments": '{"who": "Ana"}'}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    tool = {"type": "function", "function": {"name": "find"}}
    (transition,) = taught([call("a", [ASK], answer, tools=[tool])], renderer).transitions
    assert renderer.decode(transition.sampled_ids, special=True) == '<find>find{"who": "Ana"}</find><|end|>'
    assert '"name": "find"' in renderer.decode(transition.prompt_ids, special=True)


def test_prompts_go_on_as_the_gateway_would_make_them_with_earlier_thinking_where_the_family_keeps_it(
    folder: Path, tmp_path: Path
) -> None:
    class Keeping(Renderer):
        """A family that goes on from what was sampled, whatever its template makes of it."""

        def bridge(
            self, prompt_ids: Any, sampled_ids: Any, new_messages: Any, tools: Any, template_kwargs: Any = None
        ) -> list[int]:
            return self.encode(self.render(new_messages, tools, generate=True), after=sampled_ids[-1])

    renderer_with(folder, tmp_path, FORGETS)
    calls = [call("a", [ASK], {**LOOK, "reasoning_content": "look it up"}), call("b", [FACT], TELL, parent="a")]
    forgetting, keeping = (completion_rows(taught(calls, kind(tmp_path))) for kind in (Renderer, Keeping))
    assert len(forgetting) == 2
    assert len(keeping) == 1
    assert "look it up" in Renderer(tmp_path).decode(keeping[0].tokens)


NOW = tiny_model.CHAT_TEMPLATE.replace("'<|assistant|>' }}", "'<|assistant|>now: ' }}")


@pytest.mark.parametrize(
    ("template", "calls", "reason"),
    [
        (NOW, TWO_TURNS, "otherwise than it opens one"),
        ("{{ raise_exception('no user') }}", TWO_TURNS, "no user"),
        (None, [call("b", [FACT], TELL, parent="a")], "call b continues call a, which is not recorded"),
        (None, [call("a", [ASK], LOOK, protocol="completions")], "a raw prompt"),
        (None, [call("a", [ASK], LOOK, policy="default")], "the teacher answered none of its calls"),
        (None, [], "the teacher answered none of its calls"),
    ],
)
def test_what_cannot_be_rendered_is_left_out_with_the_reason(
    folder: Path, tmp_path: Path, template: str | None, calls: list[Call], reason: str
) -> None:
    renderer = Renderer(folder) if template is None else renderer_with(folder, tmp_path, template)
    found = rendered(ROLLOUT, calls, renderer, external)
    assert isinstance(found, str)
    assert reason in found
