"""Real chat templates and real conversations for tests: vocabularies that fit, traces, and agents that replay them.

The engine is scripted: it answers as the model's own template would write the trace's message, but in ids that no tokenizer
would choose. gpt-oss is left out: its vocabulary is not that of any tokenizer made here.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from conversations import TOOLS
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import RequestView, normal
from agentlightning.rendering.renderer import Renderer, RenderError

Message = dict[str, Any]
Talk = tuple[list[Message], list[Message] | None]
"""Messages and tools."""

DATA = Path(os.environ.get("AGL_DATA", ""), "traces")
TEMPLATES = Path(os.environ.get("AGL_DATA", ""), "chat_templates")

ENDS = {
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "gemma3": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "llama3_1": ["<|eot_id|>"],
    "llama3_2": ["<|eot_id|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "phi3_5": ["<|end|>"],
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
}
"""The eleven families, and what ends an answer of theirs; a second one ends an answer that calls tools."""
BEGINS = {"deepseekv3": "<｜begin▁of▁sentence｜>"}
OTHERS = {
    "glm4moe": ["<|system|>", "<|endoftext|>", "[gMASK]"],
    "qwen3": ["<|endoftext|>"],
    "qwen3_5_think": ["<|endoftext|>"],
}
"""Tokens that the family's vocabulary has, though its template does not spell them out."""
WITHOUT_TOOLS = ("deepseekv3", "gemma3", "phi3_5")
THINKING = ("deepseekv3", "glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think")
"""Those whose templates write old thinking in another way than it was sampled, or leave it out."""

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
values = st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=2))


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Random conversations: thinking or not, no, one or several tool calls, empty and odd texts."""
    messages: list[Message] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(texts)})
    for number in range(draw(st.integers(2, 6))):
        answer: Message = {"role": "assistant", "content": draw(texts)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(texts) + "hm"
        arguments = draw(st.lists(st.dictionaries(texts, values, max_size=2), max_size=2))
        if arguments:
            answer["tool_calls"] = [
                {"id": f"c{number}{at}", "type": "function", "function": {"name": "f", "arguments": json.dumps(given)}}
                for at, given in enumerate(arguments)
            ]
        results = [
            {"role": "tool", "tool_call_id": f"c{number}{at}", "content": draw(texts)} for at in range(len(arguments))
        ]
        messages += [answer, *(results or [{"role": "user", "content": draw(texts)}])]
    return messages, TOOLS


# --- renderers --------------------------------------------------------------------------------------------------------


class TemplateAlone(Renderer):
    """Knows no families."""

    def bridge(self, *_: Any) -> None:
        return None


def renderer_for(family: str, folder: Path, kind: type[Renderer] = Renderer, template: str | None = None) -> Renderer:
    """A renderer of a tokenizer that is trained here and has the special tokens of the family."""
    template = template or (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    begin = BEGINS.get(family, "<|begin|>")
    special = re.findall(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|<sop>", template)
    plain = re.findall(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>", template)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=sorted({*special, *ENDS[family], *OTHERS.get(family, ()), begin}),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(messages) for messages, _ in traces()[:60]], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in sorted(set(plain))])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(end) for end in ENDS[family]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    settings = {"eos_token": ENDS[family][0], "bos_token": begin, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return kind(folder)


# --- agents and engines -----------------------------------------------------------------------------------------------


class Replay:
    """An agent and an engine that hold a conversation of the past."""

    def __init__(
        self,
        renderer: Renderer,
        script: list[Message],
        tools: list[Message] | None,
        rng: random.Random,
        whole: str = "",
    ) -> None:
        self.renderer = renderer
        self.conversation = Conversation(renderer)
        self.script = script
        self.tools = tools
        self.messages: list[Message] = []
        self.plans: list[tuple[int, PromptPlan]] = []
        """With the number of messages before."""
        self.seen: dict[str, list[int]] = {}
        self._rng = rng
        self._whole = whole

    def run(self) -> None:
        """Until the script ends, or the template takes no more of it."""
        for message in self.script:
            if message["role"] == "assistant":
                try:
                    plan = self.conversation.plan(RequestView.of(self.messages, self.tools))
                except RenderError:
                    return  # a tool at a time, users and assistants by turns: families differ
                self._answer(plan, message)
            self.messages.append(message)

    def thought(self, before: int) -> bool:
        """Whether the template had thinking to drop: written by an answer, or opened by the prompt of one."""
        answers = [one for one in self.messages[:before] if one["role"] == "assistant"]
        return any("reasoning_content" in one for one in answers) or any(
            plan.prompt_text.rstrip().endswith("<think>") for at, plan in self.plans if at < before
        )

    def _answer(self, plan: PromptPlan, message: Message) -> None:
        if plan.parent is not None:
            before = self.seen[plan.parent.call_id]
            assert plan.prompt_ids[: len(before)] == before
        text = written(self.renderer, self.messages, message, self.tools)
        ends = list(self.renderer.end_ids)
        ids = [*pieces(self.renderer, text, self._rng, self._whole), ends[-1 if message.get("tool_calls") else 0]]
        call_id = str(len(self.plans))
        self.conversation.record(plan, call_id, ids, message)
        self.seen[call_id] = plan.prompt_ids + ids
        self.plans.append((len(self.messages), plan))


def written(renderer: Renderer, messages: list[Message], answer: Message, tools: list[Message] | None) -> str:
    """The answer as the template writes it, or as plainly as can be where it does not go on from the prompt."""
    view = [normal(message) for message in messages]
    closing = renderer.closing or ""
    before = renderer.render(view, tools, generate=True)
    try:
        after = renderer.render([*view, normal(answer)], tools, generate=False)
    except RenderError:
        after = ""
    if after.startswith(before) and after.endswith(closing):
        return after[len(before) : len(after) - len(closing)]
    opened = before.rstrip().endswith("<think>")
    return ("hm\n</think>\n\n" if opened else "") + json.dumps([answer.get("content"), answer.get("tool_calls")])


def pieces(renderer: Renderer, text: str, rng: random.Random, whole: str = "") -> list[int]:
    """Ids of the text, cut at random places before it is encoded, but for what `whole` matches."""
    if whole:
        parts = re.split(f"({whole})", text)
        return [
            index
            for part in parts
            for index in (renderer.encode(part) if re.fullmatch(whole, part) else pieces(renderer, part, rng))
        ]
    ids: list[int] = []
    while text:
        cut = rng.randint(1, 40)
        ids += renderer.encode(text[:cut])
        text = text[cut:]
    return ids


# --- traces -----------------------------------------------------------------------------------------------------------


@cache
def traces() -> list[Talk]:
    """Conversations that have a second answer."""
    found = [*responses(), *sql()]
    return [talk for talk in found if sum(message["role"] == "assistant" for message in talk[0]) > 1]


def responses() -> Iterator[Talk]:
    """OpenAI Responses items: thinking, text and parallel tool calls of one turn become one message."""
    for row in rows("nemo_gym_rollouts"):
        asked, answered = row["responses_create_params"], row["response"]
        output = answered["output"] if isinstance(answered, dict) else answered
        given = asked["input"] if isinstance(asked["input"], list) else [{"role": "user", "content": asked["input"]}]
        if not isinstance(output, list) or not given:
            continue
        messages: list[Message] = []
        for item in [*given, *output]:
            kind = item.get("type", "message")
            if kind == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": str(item["output"])})
            elif kind == "message" and item["role"] != "assistant":
                messages.append({"role": item["role"], "content": text_of(item["content"])})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                add_to(messages[-1], kind, item)
        tools = [
            {
                "type": "function",
                "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)},
            }
            for tool in asked.get("tools") or ()
        ]
        yield messages, tools or None


def add_to(message: Message, kind: str, item: dict[str, Any]) -> None:
    if kind == "reasoning":
        texts = item.get("content") or item.get("summary") or ()
        thought = "".join(part["text"] for part in texts)
        message["reasoning_content"] = (message.get("reasoning_content", "") + thought).strip() or "hm"
    elif kind == "function_call":
        call = {"name": item["name"], "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
    else:
        message["content"] += text_of(item["content"])


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def sql() -> Iterator[Talk]:
    """Questions, SQL as plain answers, and what the database said."""
    for row in rows("intercode_sql")[:400:5]:
        turns = row["turn_history"]
        messages: list[Message] = [{"role": "user", "content": row["query"]}]
        for action, seen in zip(turns["actions"], turns["observations"], strict=True):
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": seen}]
        yield messages, None


def rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def fitting(family: str, messages: list[Message], tools: list[Message] | None) -> Talk:
    """The conversation as a model of this family can hold it: without thinking, or as text alone where it knows no tools."""
    if family not in THINKING:
        messages = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in messages]
    if family not in WITHOUT_TOOLS:
        return messages, tools
    result: list[Message] = []
    for message in messages:
        role = "user" if message["role"] in ("tool", "user") else message["role"]
        text = message["content"] or json.dumps(message.get("tool_calls"))
        if result and result[-1]["role"] == role == "user":
            result[-1] = {"role": role, "content": result[-1]["content"] + "\n" + text}
        else:
            extra = {key: message[key] for key in ("reasoning_content",) if key in message}
            result.append({"role": role, "content": text, **extra})
    return result, None
