"""Counts prompts that begin with exactly the token ids that the model saw and sampled before, with the graph and without.

Seeded conversations of a main agent and three concurrent sub-agents on one key, all calling tools and only appending to
their histories, go through the gateway's `Conversation`. Their answers come from a noisy model: thinking, tool calls in
parallel, JSON with odd spacing, and text cut into pieces of the vocabulary as no tokenizer would cut it. Beside it, the same
messages are rendered and tokenised at every turn, which is what a system does that keeps text. A template and a tokenizer
are made on the spot; with AGL_DATA, the chat templates of real model families get a line each.

Half of the agents send thinking back, half drop it, as SDKs do; both count against whoever needs the text. With
--replaced-prompts each agent's own system prompt changes with every call, and a template takes its place, as by a rule of a
run's [prompts].

    python benchmarks/drift.py [--conversations 1000] [--seed 0] [--noise 0.02] [--templates-alone] [--replaced-prompts]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentlightning.gateway.policy.response_decoder import ResponseDecoder
from agentlightning.protocols import chat
from agentlightning.protocols.base import CompletionRequest, assistant_message
from agentlightning.protocols.system_prompts import replace_system
from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import RequestView, normal
from agentlightning.rendering.renderer import Renderer, RenderError

SUB_AGENTS = 3
REAL_SHARE = 40
"""Conversations with a real template: one in so many."""

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall one as <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ENDS = {
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "gemma3": ("<end_of_turn>",),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "llama3_1": ("<|eot_id|>",),
    "llama3_2": ("<|eot_id|>",),
    "phi3_5": ("<|end|>",),
}
"""What ends an answer, by family, and what ends one that calls tools, where that differs; ChatML's end elsewhere."""
BEGINS = {"deepseekv3": "<｜begin▁of▁sentence｜>"}
OTHERS = {
    "glm4moe": ("<|system|>", "<|endoftext|>", "[gMASK]"),
    "qwen3": ("<|endoftext|>",),
    "qwen3_5_think": ("<|endoftext|>",),
}
"""Tokens that the family's vocabulary has, though its template does not spell them out."""
LEFT_OUT = "gptoss"
"""Its vocabulary is not that of any tokenizer trained here."""
WITHOUT_TOOLS = ("deepseekv3", "gemma3", "phi3_5")

WORDS = """
    the a of in to and is it what which when where how many name list find all show total average before after city country
    weather river table column value result price order customer report check again because so answer question let us see
    think first then next last number year month day people singer concert flight airport university student course
""".split()  # noqa: SIM905
NAMES = ("search", "read_file", "run_query", "calculate")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do {name.replace('_', ' ')}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what"},
                    "limit": {"type": "integer", "description": "how many"},
                },
                "required": ["query"],
            },
        },
    }
    for name in NAMES
]

Message = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--noise", type=float, default=0.02, help="how often a token is sampled as two others with the same text"
    )
    parser.add_argument(
        "--templates-alone", action="store_true", help="leave out what the renderers package knows of model families"
    )
    parser.add_argument(
        "--replaced-prompts", action="store_true", help="replace system prompts, which change with every call"
    )
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        rows = []
        for name, template in templates():
            renderer = build(Path(folder) / name, template, TemplateAlone if arguments.templates_alone else Renderer)
            count = arguments.conversations if name == "chatml" else max(1, arguments.conversations // REAL_SHARE)
            task = progress.add_task(name, total=count)
            figures = Figures(name)
            started = time.perf_counter()
            for number in range(count):
                rng = random.Random(f"{arguments.seed}/{name}/{number}")
                model = Model(renderer, rng, arguments.noise)
                converse(model, figures, NAMES if name not in WITHOUT_TOOLS else (), arguments.replaced_prompts)
                progress.advance(task)
            figures.seconds = time.perf_counter() - started
            rows.append(figures)
    print(
        f"{'template':<20} {'calls':>7} {'with predecessor':>17} {'exact':>8} {'re-tokenised':>13} {'plan ms':>8} "
        f"{'sampled':>9} {'context only':>13}  forks"
    )
    for row in rows:
        forks = ", ".join(f"{cause} {calls}" for cause, calls in row.causes.most_common()) or "none"
        print(
            f"{row.name:<20} {row.calls:>7,} {row.successors:>17,} {row.share(row.exact):>8.2%} "
            f"{row.share(row.retokenised):>13.2%} {1000 * row.planning / row.calls:>8.2f} {row.sampled:>9,} "
            f"{row.untrained_tokens:>13,}  {forks}"
        )
    made = rows[0]
    print(
        json.dumps(
            {
                "exact_share": round(made.share(made.exact), 4),
                "retokenised_exact_share": round(made.share(made.retokenised), 4),
                "forks_by_cause": dict(made.causes),
                "calls": made.calls,
                "plan_ms": round(1000 * made.planning / made.calls, 3),
                "real_templates": {row.name: round(row.share(row.exact), 4) for row in rows[1:]},
                "real_untrained_tokens": {row.name: row.untrained_tokens for row in rows[1:]},
            }
        )
    )


@dataclass
class Figures:
    """The counts of one template."""

    name: str
    calls: int = 0
    successors: int = 0
    exact: int = 0
    retokenised: int = 0
    sampled: int = 0
    """Tokens."""
    untrained_tokens: int = 0
    """Sampled tokens that prompts repeat without continuing them; those that several prompts repeat count as often."""
    planning: float = 0.0
    """Seconds spent in `Conversation.plan`."""
    seconds: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)

    def share(self, count: int) -> float:
        """Of the calls that have a predecessor."""
        return count / max(1, self.successors)


class TemplateAlone(Renderer):
    """Knows no families."""

    def bridge(self, *_: Any) -> None:
        return None


# --- conversations ----------------------------------------------------------------------------------------------------


def converse(model: Model, figures: Figures, names: tuple[str, ...], replaced: bool) -> None:
    """One main agent and its sub-agents, whose calls are under way at the same time, on one key."""
    conversation = Conversation(model.renderer)
    agents = [Agent(model, conversation, str(number), names, replaced) for number in range(1 + SUB_AGENTS)]
    while waiting := [agent for agent in agents if agent.left]:
        model.rng.choice(waiting).act(figures)


class Agent:
    """Asks, receives, appends. Its call is planned in one act and recorded in a later one: others come in between."""

    def __init__(
        self, model: Model, conversation: Conversation, name: str, names: tuple[str, ...], replaced: bool
    ) -> None:
        rng = model.rng
        self.left = rng.randint(3, 9)
        self._model = model
        self._renderer = model.renderer
        self._conversation = conversation
        self._name = name
        self._tools = [tool for tool in TOOLS if tool["function"]["name"] in names] or None
        self._drops_reasoning = rng.random() < 0.5
        system = {"role": "system", "content": f"You are agent {'of all' if name == '0' else 'below'}. {words(rng, 8)}"}
        self._messages: list[Message] = [system, {"role": "user", "content": f"{words(rng, 6)} {name}?"}]
        self._prompt = f"Template for agent {name}: {words(rng, 12)}" if replaced else None
        self._plan: PromptPlan | None = None
        self._calls = 0
        self._before: list[int] = []
        self._retokenised: list[int] = []

    def act(self, figures: Figures) -> None:
        """Send a request, or receive its answer."""
        if self._plan is None:
            self._ask(figures)
        else:
            self._receive(self._plan, figures)

    def _ask(self, figures: Figures) -> None:
        started = time.perf_counter()
        self._plan = plan = self._conversation.plan(RequestView.of(self._sent(), self._tools))
        figures.planning += time.perf_counter() - started
        figures.calls += 1
        text = self._renderer.render(self._plain(), self._tools, generate=True)
        tokenised = self._renderer.encode(text)
        if self._calls:
            figures.successors += 1
            figures.exact += begins(plan.prompt_ids, self._before)
            figures.retokenised += begins(tokenised, self._retokenised)
        figures.untrained_tokens += plan.untrained_tokens
        if plan.fork_cause is not None:
            figures.causes[plan.fork_cause] += 1
        self._retokenised = tokenised

    def _receive(self, plan: PromptPlan, figures: Figures) -> None:
        rng, renderer = self._model.rng, self._renderer
        body = self._model.answer(self._plain(), self._tools)
        request = CompletionRequest(model="", messages=[], tools=self._tools, parse_tools=bool(self._tools))
        decoder = ResponseDecoder(renderer, request, plan.prompt_text, f"call_{self._calls}_")
        decoder.sampled.ids = body
        decoder.finish()
        answer = assistant_message(decoder.choice())
        ids = [*body, list(renderer.end_ids)[-1 if "tool_calls" in answer else 0]]
        self._conversation.record(plan, f"{self._name}-{self._calls}", ids, answer)
        figures.sampled += len(ids)
        self._before = plan.prompt_ids + ids
        self._retokenised = self._retokenised + ids
        self._calls += 1
        self.left -= 1
        self._plan = None
        if self._drops_reasoning:
            answer.pop("reasoning_content", None)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"rows": words(rng, 12)})}
            for call in answer.get("tool_calls", ())
        ]
        self._messages = [*self._messages, answer, *(results or [{"role": "user", "content": words(rng, 8)}])]

    def _plain(self) -> list[Message]:
        """The messages with their arguments parsed, as chat templates want them."""
        return [normal(message) for message in self._sent()]

    def _sent(self) -> list[Message]:
        """The messages as the conversation gets them."""
        if self._prompt is None:
            return self._messages
        own = {"role": "system", "content": f"{self._messages[0]['content']} It is {self._calls} o'clock."}
        request, _ = replace_system(chat.NAME, {"messages": [own, *self._messages[1:]]}, self._prompt)
        return list(request["messages"])


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def begins(ids: list[int], before: list[int]) -> bool:
    return ids[: len(before)] == before


# --- the noisy model --------------------------------------------------------------------------------------------------


class Model:
    """Answers in the form of its own template, but not to the letter, nor in the tokens that a tokenizer would choose."""

    def __init__(self, renderer: Renderer, rng: random.Random, noise: float) -> None:
        self.renderer = renderer
        self.rng = rng
        self._noise = noise

    def answer(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        """Sampled ids, without the one that ends them."""
        result: list[int] = []
        for index in self.renderer.encode(self._text(messages, tools)):
            pieces = splits(self.renderer, index) if self.rng.random() < self._noise else []
            result += self.rng.choice(pieces) if pieces else (index,)
        return result

    def _text(self, messages: list[Message], tools: list[Message] | None) -> str:
        rng, renderer = self.rng, self.renderer
        answer: Message = {"role": "assistant", "content": words(rng, rng.randint(0, 12))}
        must_think = renderer.render(messages, tools, generate=True).rstrip().endswith("<think>")
        if must_think or (renderer.parser.thinks and rng.random() < 0.7):
            answer["reasoning_content"] = words(rng, rng.randint(3, 25))
        if tools and rng.random() < 0.8:
            answer["tool_calls"] = [tool_call(rng, tools) for _ in range(rng.choice([1, 1, 1, 2]))]
        text = written(renderer, messages, answer, tools)
        if text is None and len(answer.get("tool_calls", ())) > 1:  # some families call one tool at a time
            answer["tool_calls"] = answer["tool_calls"][:1]
            text = written(renderer, messages, answer, tools)
        if text is None:
            thought = f"{answer['reasoning_content']}\n</think>\n\n" if must_think else ""
            return thought + (answer["content"] or "ok")
        if rng.random() < 0.3:
            text = re.sub(r'": (?=["{0-9])', lambda _: rng.choice(['":', '" : ', '":  ']), text)
        return text + rng.choice(["", "", "", "\n", " "])


def tool_call(rng: random.Random, tools: list[Message]) -> Message:
    arguments = {"query": words(rng, 3) + rng.choice(["", " é", ' "x"']), "limit": rng.randint(1, 99)}
    function = {"name": rng.choice(tools)["function"]["name"], "arguments": arguments}
    return {"id": "call", "type": "function", "function": function}


def written(renderer: Renderer, messages: list[Message], answer: Message, tools: list[Message] | None) -> str | None:
    """The answer as the model's template writes it; None where it does not say."""
    try:
        before = renderer.render(messages, tools, generate=True)
        after = renderer.render([*messages, answer], tools, generate=False)
    except RenderError:
        return None
    closing = renderer.closing or ""
    if not after.startswith(before) or not after.endswith(closing):
        return None
    return after[len(before) : len(after) - len(closing)]


def splits(renderer: Renderer, index: int) -> list[tuple[int, int]]:
    """All pairs of tokens whose texts are, together, that of token `index`."""
    text = renderer.token_text(index)
    pairs = []
    for cut in range(1, len(text)):
        left, right = renderer.encode(text[:cut]), renderer.encode(text[cut:])
        if len(left) == len(right) == 1 and renderer.decode([*left, *right]) == text:
            pairs.append((left[0], right[0]))
    return pairs


# --- tokenizers and templates -----------------------------------------------------------------------------------------


def templates() -> Iterator[tuple[str, str]]:
    """Names and texts: the one made here, then the real ones that there are."""
    yield "chatml", TEMPLATE
    data = os.environ.get("AGL_DATA")
    for file in sorted(Path(data, "chat_templates").glob("*.jinja")) if data else ():
        if file.stem != LEFT_OUT:
            yield file.stem, file.read_text(encoding="utf-8")


def build(folder: Path, template: str, kind: type[Renderer]) -> Renderer:
    """A renderer of a tokenizer that is trained here, with the special tokens of the family that the folder is named for."""
    begin, ends = BEGINS.get(folder.name, "<|begin|>"), ENDS.get(folder.name, ("<|im_end|>",))
    written = re.findall(r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|<sop>", template)
    special = sorted({*written, *ends, *OTHERS.get(folder.name, ()), begin})
    plain = re.findall(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>", template)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    corpus = [words(rng, 20) + json.dumps({"name": rng.choice(NAMES), "arguments": {"query": "x"}}) for _ in range(500)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in sorted(set(plain))])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": ends[0], "bos_token": begin, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ids = {"eos_token_id": [tokenizer.token_to_id(end) for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    return kind(folder)


if __name__ == "__main__":
    main()
