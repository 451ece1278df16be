"""Where the model family's own renderer says what follows an answer, the recorded ids are kept to the last one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import Talk
from toy_templates import THINKING

from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

Message = dict[str, Any]


class Bridged(Renderer):
    """Knows how a family goes on: thinking stays in the history, whatever the template says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[tuple[list[int], list[int], list[Message]]] = []
        self.knows = True

    def bridge(
        self,
        prompt_ids: list[int],
        sampled_ids: list[int],
        messages: list[Message],
        tools: list[Message] | None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int] | None:
        self.asked.append((prompt_ids, sampled_ids, messages))
        if not self.knows:
            return None
        said = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return self.encode(f"\n{said}<|im_start|>assistant\n")


@pytest.fixture
def bridged(make_renderer: Callable[..., Renderer], tokenizer_file: Path, tmp_path: Path) -> Bridged:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    return Bridged(tmp_path)


def talk(renderer: Renderer) -> Talk:
    result = Talk(renderer, None, [{"role": "user", "content": "q"}])
    result.turn("<think>\nhm\n</think>\n\nyes")
    return result


def test_thinking_that_the_template_would_drop_is_kept(bridged: Bridged) -> None:
    recorded = talk(bridged)
    recorded.messages.append({"role": "user", "content": "and?"})
    plan = recorded.conversation.plan(RequestView.of(recorded.messages, None))
    assert plan.prompt_ids == recorded.whole["0"] + plan.suffix_ids
    assert (
        bridged.decode(plan.suffix_ids, special=True) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (plan.fork_cause, plan.untrained_tokens) == (None, 0)
    (asked,) = bridged.asked
    assert asked == (recorded.plans[0].prompt_ids, recorded.sampled[0], [{"role": "user", "content": "and?"}])


def test_where_the_family_does_not_say_the_template_is_asked(bridged: Bridged) -> None:
    bridged.knows = False
    recorded = talk(bridged)
    tool = {"role": "tool", "content": "ok", "tool_call_id": "c"}
    plan = recorded.conversation.plan(RequestView.of([*recorded.messages, tool], None))
    assert (plan.fork_cause, plan.prompt_ids) == (None, recorded.whole["0"] + plan.suffix_ids)
    user = {"role": "user", "content": "and?"}
    plan = recorded.conversation.plan(RequestView.of([*recorded.messages, user], None))
    assert plan.fork_cause == "template_rewrites_history"


def test_the_template_goes_on_after_a_bridge(bridged: Bridged) -> None:
    recorded = talk(bridged)
    tool = {"role": "tool", "content": "ok", "tool_call_id": "c"}
    recorded.messages.append(tool)
    recorded.turn("<think>\nhm\n</think>\n\nno")
    bridged.knows = False
    for conversation in (recorded.conversation, Conversation(bridged, recorded.calls)):
        plan = conversation.plan(RequestView.of([*recorded.messages, tool], None))
        assert (plan.fork_cause, plan.prompt_ids) == (None, recorded.whole["1"] + plan.suffix_ids)
