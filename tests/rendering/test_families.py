"""Families that the `renderers` package knows: thinking stays in the prompt, what is new is in the template's own ids."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conversations import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import (
    DATA,
    ENDS,
    TEMPLATES,
    THINKING,
    Message,
    Replay,
    Talk,
    fitting,
    renderer_for,
    talks,
    texts,
    traces,
)
from toy_templates import THINKING as TOY_THINKING

from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView, normal
from agentlightning.rendering.renderer import Renderer, RenderError

FEW = 12
"""Traces of each template that quick tests replay."""

WITH_TOOLS = [family for family in THINKING if family != "deepseekv3"]

Maker = Callable[..., Renderer]

real = pytest.mark.skipif(not DATA.is_dir(), reason="AGL_DATA has no traces")

QUESTION: list[Message] = [{"role": "user", "content": "and?"}]


@pytest.fixture(scope="module")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """renderer_of(family) or, with some text of the template replaced, renderer_of(family, old, new)."""

    @cache
    def make(family: str, old: str = "", new: str = "") -> Renderer:
        template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
        assert old in template
        folder = tmp_path_factory.mktemp(family)
        return renderer_for(family, folder, template=template.replace(old, new) if old else template)

    return make


# --- whole conversations ----------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("family", ENDS)
def test_every_appended_history_continues_what_was_sampled(family: str, renderer_of: Maker) -> None:
    for number, talk in enumerate(traces()[:: len(traces()) // FEW]):
        replay(renderer_of(family), fitting(family, *talk), random.Random(number))


@real
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ENDS)
def test_every_trace_continues_what_was_sampled(family: str, renderer_of: Maker) -> None:
    for number, talk in enumerate(traces()):
        replay(renderer_of(family), fitting(family, *talk), random.Random(number))


@real
@pytest.mark.parametrize("family", ENDS)
@settings(max_examples=15, deadline=None)
@given(talk=talks(), seed=st.integers(0, 99))
def test_random_histories_continue_what_was_sampled(family: str, renderer_of: Maker, talk: Talk, seed: int) -> None:
    replay(renderer_of(family), fitting(family, *talk), random.Random(seed))


def replay(renderer: Renderer, talk: Talk, rng: random.Random) -> None:
    """Hold the conversation: each prompt begins with the ids seen before (the replay looks), and ends as the template would.

    Markers of thinking are sampled whole: a family does not take their letters for them.
    """
    replayed = Replay(renderer, *talk, rng, whole="</?think>")
    replayed.run()
    for at, plan in replayed.plans[1:]:
        assert plan.fork_cause is None
        view = [normal(message) for message in replayed.messages[:at]]
        afresh = renderer.encode(renderer.render(view, replayed.tools, generate=True))
        assert plan.suffix_ids == afresh[-len(plan.suffix_ids) :]


# --- one step ---------------------------------------------------------------------------------------------------------

odd = st.one_of(
    texts, st.sampled_from(["", "\n", " x ", "</think>", "<think>", "<tool_response>\nx\n</tool_response>"])
)


@st.composite
def following(draw: st.DrawFn) -> list[Message]:
    """What may come after an answer: results of its calls, questions, system messages."""
    results = [
        {"role": "tool", "tool_call_id": f"c{at}", "content": draw(odd)} for at in range(draw(st.integers(0, 3)))
    ]
    others = draw(st.lists(st.tuples(st.sampled_from(["user", "system"]), odd), min_size=not results, max_size=2))
    return [*results, *({"role": role, "content": text} for role, text in others)]


@real
@pytest.mark.parametrize("family", THINKING)
@settings(max_examples=60, deadline=None)
@given(new=following(), thought=odd, said=odd, cut=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_bridge_adds_the_templates_ids_of_the_new_messages_or_nothing(
    family: str, renderer_of: Maker, new: list[Message], thought: str, said: str, cut: int, seed: int
) -> None:
    renderer, rng = renderer_of(family), random.Random(seed)
    tools = TOOLS if family in WITH_TOOLS else None
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    prompt = renderer.encode(renderer.render(asked, tools, generate=True))
    sampled = [*renderer.encode(f"{thought}\n</think>\n\n{said}"), rng.choice(list(renderer.end_ids))]
    sampled = sampled[: len(sampled) - cut] if rng.random() < 0.3 else sampled
    bridged = renderer.bridge(prompt, sampled, new, tools)
    answer = {"role": "assistant", "content": "a"}
    if new[0]["role"] == "tool":
        calls = [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}]
        answer |= {"content": "", "tool_calls": calls}
    try:
        afresh = renderer.encode(renderer.render([*asked, answer, *new], tools, generate=True))
    except RenderError:
        assert bridged is None
    else:
        assert bridged is None or bridged == afresh[-len(bridged) :]


@real
@pytest.mark.parametrize("family", THINKING)
def test_an_answer_that_ended_while_it_thought_is_not_bridged(family: str, renderer_of: Maker) -> None:
    assert bridge(renderer_of(family), answer="<think>\nhm") is None


@real
@pytest.mark.parametrize("family", [family for family in WITH_TOOLS if family != "nemotron_3_nano"])
def test_without_thinking_a_conversation_goes_on_as_the_template_opens_its_turns(
    family: str, renderer_of: Maker
) -> None:
    renderer, conversation = renderer_of(family), Conversation(renderer_of(family))
    messages: list[Message] = [{"role": "user", "content": "q"}]
    before: list[int] = []
    for number in range(3):
        plan = conversation.plan(RequestView.of(messages, None, template_kwargs={"enable_thinking": False}))
        assert (plan.fork_cause, plan.prompt_ids[: len(before)]) == (None, before)
        assert plan.prompt_text.endswith("</think>\n\n" if family.startswith("qwen") else "<think></think>")
        sampled = [*renderer.encode("yes"), next(iter(renderer.end_ids))]
        answer = {"role": "assistant", "content": "yes"}
        conversation.record(plan, str(number), sampled, answer)
        before = plan.prompt_ids + sampled
        messages += [answer, {"role": "user", "content": "and?"}]


def bridge(
    renderer: Renderer, new: list[Message] = QUESTION, answer: str = "<think>\nhm\n</think>\n\nyes"
) -> list[int] | None:
    """What follows a first answer, which ended as answers do that come before such messages."""
    text = renderer.render([{"role": "user", "content": "q"}], None, generate=True)
    opened = text.rstrip().endswith("<think>")
    ends = list(renderer.end_ids)
    sampled = renderer.encode(answer.removeprefix("<think>\n") if opened else answer)
    return renderer.bridge(renderer.encode(text), [*sampled, ends[-1 if new[0]["role"] == "tool" else 0]], new, None)


# --- which family -----------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("deepseekv3", "<｜Assistant｜><think>\\n", "<｜Assistant｜><think>"),
        ("deepseekv3", "'<｜User｜>' + message['content']", "'<｜User｜>' + message['content'] | trim"),
        ("glm4moe", "<|user|>\n", "<|user|>"),
        ("glm4moe", "# Tools\n", "# Tool\n"),
        ("nemotron_3_nano", "<tool_response>\\n", "<tool_response>"),
        ("nemotron_3_nano", "<|im_start|>user\\n", "<|im_start|>human\\n"),
        ("qwen3", "You may call one or more", "You can call one or more"),
        ("qwen3", "\\n<tool_response>\\n", "\\n<tool_response>"),
        ("qwen3_5_think", "'<|im_start|>' + message.role + '\\n'", "'<|im_start|>' + message.role + ' \\n'"),
        ("qwen3_5_think", "<|im_start|>assistant\\n", "<|im_start|>assistant\\n\\n"),
    ],
)
def test_a_template_that_is_a_little_different_has_no_family(
    family: str, old: str, new: str, renderer_of: Maker
) -> None:
    assert bridge(renderer_of(family, old, new)) is None


# --- the package ------------------------------------------------------------------------------------------------------


def test_no_torch_is_imported_where_it_is_needed(tokenizer_file: Path, tmp_path: Path) -> None:
    checked = "; assert 'renderers' in sys.modules and 'torch' not in sys.modules, 'imported'"
    assert load(folder_of(TOY_THINKING, tokenizer_file, tmp_path), after=checked) == ""


def test_its_absence_is_an_error_that_names_the_extra(tokenizer_file: Path, tmp_path: Path) -> None:
    said = load(folder_of(TOY_THINKING, tokenizer_file, tmp_path), before="; sys.modules['renderers'] = None")
    assert "renderers is not installed; install the extra server, in a clone: pip install '.[server]'" in said


def folder_of(template: str, tokenizer_file: Path, folder: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(template)
    return folder


def load(folder: Path, before: str = "", after: str = "") -> str:
    """What a fresh interpreter, in which warnings are errors, says in the end that loads the folder."""
    program = (
        f"import sys{before}; from agentlightning.rendering.renderer import Renderer; Renderer({str(folder)!r}){after}"
    )
    done: Any = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    return str(done.stderr)
