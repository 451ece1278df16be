"""A message that the agent begins: its text is context, what is sampled continues it, and later turns continue both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import as_call
from real_templates import DATA, ENDS, renderer_for
from toy_templates import THINKING

from agentlightning.records import Call
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer, RenderError

ASKED = {"role": "user", "content": "q"}
BEGUN = {"role": "assistant", "content": "The answer is", "prefill": True}
WHOLE = {"role": "assistant", "content": "The answer is 42."}
AGAIN = {"role": "user", "content": "sure?"}


def begin(conversation: Conversation, *messages: dict[str, Any], ended: bool = True) -> Call:
    """Plans the call, samples " 42." and records it."""
    renderer = conversation.renderer
    assert renderer is not None
    plan = conversation.plan(RequestView.of(list(messages), None))
    ids = [*renderer.encode(" 42."), *([next(iter(renderer.end_ids))] if ended else [])]
    answer = {"role": "assistant", "content": " 42."}
    conversation.record(plan, "c", ids, answer)
    return as_call(conversation, plan, "c", ids, answer)


def check(renderer: Renderer) -> None:
    """The prompt is the template's up to the text, and the next turn goes on from the sampled ids, also after a restart."""
    conversation = Conversation(renderer)
    call = begin(conversation, ASKED, BEGUN)
    text = renderer.render([ASKED, WHOLE], None, generate=False)
    before = text[: text.rindex(" 42.")]
    assert call.suffix_ids == renderer.encode(before)
    assert before.endswith("The answer is")
    for known in (conversation, Conversation(renderer, [call])):
        plan = known.plan(RequestView.of([ASKED, WHOLE, AGAIN], None))
        assert (plan.fork_cause, plan.parent is not None) == (None, True)
        assert plan.prompt_ids[: len(plan.prompt_ids) - len(plan.suffix_ids)] == call.suffix_ids + call.sampled_ids


def test_a_begun_message_is_continued_exactly(renderers: dict[str, Renderer]) -> None:
    for renderer in renderers.values():
        check(renderer)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not DATA.is_dir(), reason="AGL_DATA has no chat templates")
@pytest.mark.parametrize("family", ENDS)
def test_a_begun_message_is_continued_exactly_by_every_family(family: str, tmp_path: Path) -> None:
    check(renderer_for(family, tmp_path))


def test_it_may_stand_in_a_later_turn_and_be_cut_by_the_limit(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["hermes"]
    conversation = Conversation(renderer)
    first = begin(conversation, ASKED, BEGUN)
    history = [ASKED, WHOLE, AGAIN]
    plan = conversation.plan(RequestView.of([*history, BEGUN], None))
    assert plan.parent is not None
    assert renderer.decode(plan.suffix_ids, special=True).endswith("assistant\nThe answer is")
    ids = renderer.encode(" 4")
    conversation.record(plan, "second", ids, {"role": "assistant", "content": " 4"})
    cut = [*history, {"role": "assistant", "content": "The answer is 4"}, ASKED]
    for known in (
        conversation,
        Conversation(
            renderer, [first, as_call(conversation, plan, "second", ids, {"role": "assistant", "content": " 4"})]
        ),
    ):
        assert known.plan(RequestView.of(cut, None)).parent is not None


def test_space_at_its_end_counts_and_the_same_request_without_it_is_another(renderers: dict[str, Renderer]) -> None:
    conversation = Conversation(renderers["llama"])
    spaced = {**BEGUN, "content": "The answer is "}
    plans = [conversation.plan(RequestView.of([ASKED, *more], None)) for more in ([], [BEGUN], [spaced])]
    assert len({plan.request_hash for plan in plans}) == 3
    assert plans[2].prompt_text.endswith("The answer is ")
    assert [plan.fork_cause for plan in plans] == [None] * 3
    begin(conversation, ASKED, BEGUN)
    assert conversation.unanswered(plans[1].request_hash) == ["c"]
    assert conversation.unanswered(plans[0].request_hash) == []


def test_the_familys_own_renderer_goes_on_before_it(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(THINKING)
    said: list[Any] = []

    class Bridged(Renderer):
        def bridge(self, prompt: Any, sampled: Any, messages: Any, *_: Any) -> list[int]:
            said.append(messages)
            return self.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", after=sampled[-1])

    bridged = object.__new__(Bridged)
    bridged.__dict__.update(renderer.__dict__)
    conversation = Conversation(bridged)
    plan = conversation.plan(RequestView.of([ASKED], None))
    ids = [*renderer.encode("<think>\nhm\n</think>\n\n42"), next(iter(renderer.end_ids))]
    answer = {"role": "assistant", "content": "42", "reasoning_content": "hm"}
    conversation.record(plan, "c", ids, answer)
    later = conversation.plan(RequestView.of([ASKED, answer, AGAIN, BEGUN], None))
    assert (later.parent is not None, said) == (True, [[AGAIN]])
    assert renderer.decode(later.prompt_ids, special=True).endswith(
        "hm\n</think>\n\n42<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nThe answer is"
    )


def test_a_template_that_leaves_its_text_out_is_named(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(RenderError, match="does not write the text that is to be continued"):
        renderer.render([ASKED, BEGUN], None, generate=True)
