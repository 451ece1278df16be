"""Families: what the `renderers` package knows of the model families whose templates rewrite earlier completions.

Driven by the renderer, for whose tokenizer folder it looks up the family: one that the folder's vocabulary fits, and that
writes probe conversations in the ids of the folder's own template. Such a family says how a prompt goes on after sampled ids
that the template would write otherwise, and each time the template is asked as well: they agree, or nothing is said. It
knows nothing of recorded calls, and never loads anything over the network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentlightning.errors import InputError, MissingExtraError
from agentlightning.records import JSON

if TYPE_CHECKING:
    from renderers import Renderer as FamilyRenderer
    from tokenizers import Tokenizer

    from agentlightning.rendering.renderer import Renderer

log = logging.getLogger(__name__)

FAMILIES = (
    "Qwen3", "PrimeQwen3", "Qwen35", "Qwen36", "Qwen38", "Qwen3VL", "GLM45", "GLM5", "GLM51", "GLM53", "Nemotron3",
    "Nemotron3Ultra", "Nemotron35", "DeepSeekR1", "DeepSeekV4", "MiniMaxM2", "KimiK2", "KimiK25", "Hy3",
    "LagunaXS2", "LagunaM1", "LagunaXS21", "LagunaS21", "Gemma4",
)  # fmt: skip
"""Families in `renderers` that are tried, in this order. gpt-oss is not: it downloads its vocabulary."""

ANSWER = "agl-answer-51d0be"
"""Stands for the last text of a completion; no template trims or rewrites it."""
THOUGHT = "agl-thought-8e24c7"


class Family:
    """A family that writes as one tokenizer folder's template does, wherever that template rewrites nothing."""

    def __init__(self, name: str, known: FamilyRenderer, renderer: Renderer) -> None:
        self.name = name
        self._known = known
        self._renderer = renderer
        self._ends = {calls: _answer_end(renderer, calls) for calls in (False, True)}

    def bridge(
        self,
        prompt_ids: list[int],
        sampled_ids: list[int],
        new_messages: list[JSON],
        tools: list[JSON] | None,
        template_kwargs: JSON | None = None,
    ) -> list[int] | None:
        """The ids that follow `prompt_ids + sampled_ids` up to the next completion. Messages are normal ones, none of them a
        completion. None where the family does not say, or where the template writes the new messages in another way.

        The family knows no `template_kwargs`: it is asked without them, and where it agrees, the new messages are what the
        template writes with them.
        """
        last = sampled_ids[-1] if sampled_ids else None
        text = self._following(sampled_ids, new_messages, tools)
        if text is None:
            return None
        try:
            bridged = self._known.bridge_to_next_turn(prompt_ids, sampled_ids, new_messages, tools=tools)
        except Exception as cause:  # it documents none; whatever it refuses, the template's difference is still there
            log.debug("the family %s fails on a conversation: %r", self.name, cause)
            return None
        before = prompt_ids + sampled_ids
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        ids: list[int] = bridged.token_ids[len(before) :]
        if ids != self._renderer.encode(text, after=last):
            return None
        if not template_kwargs:
            return ids
        text = self._following(sampled_ids, new_messages, tools, template_kwargs)
        return None if text is None else self._renderer.encode(text, after=last)

    def _following(
        self,
        sampled_ids: list[int],
        new_messages: list[JSON],
        tools: list[JSON] | None,
        template_kwargs: JSON | None = None,
    ) -> str | None:
        """The text that the template writes after the sampled ids, from its rendering of the new messages after a short
        completion."""
        results = [message for message in new_messages if message["role"] == "tool"]
        history = _history(results)
        end = self._ends[bool(results)]
        if end is None:
            return None
        try:
            whole = self._renderer.render([*history, *new_messages], tools, True, template_kwargs)
        except InputError:
            return None
        _, _, rest = whole.partition(ANSWER)
        if not rest.startswith(end):
            return None
        _, token = self._renderer.split_end(sampled_ids)
        return self._renderer.after_answer(token, rest[len(end) :], whole)


def find_family(renderer: Renderer, tokenizer: Tokenizer) -> Family | None:
    """The family of a tokenizer folder; None where its template rewrites no completions, so that none is needed, and where
    no family writes as the template does. Raises MissingExtraError where the package is needed and absent."""
    if not _rewrites(renderer):
        return None
    try:
        import renderers
    except ModuleNotFoundError as cause:
        raise MissingExtraError(str(cause.name), "server") from cause
    tokens = _Tokens(tokenizer, next(iter(renderer.end_ids), None))
    for name in FAMILIES:
        try:
            config = getattr(renderers, f"{name}RendererConfig")(thinking_retention="all")
            known = renderers.create_renderer(tokens, config)
            differing = _differing(renderer, known)
        except Exception as cause:  # for a missing token most raise AssertionError
            log.debug("the family %s does not fit the vocabulary: %r", name, cause)
            continue
        if differing is None:
            log.debug("prompts continue as the family %s does", name)
            return Family(name, known, renderer)
        log.debug("the chat template is not that of the family %s: %s differs", name, differing)
    return None


# --- what the template does ---------------------------------------------------------------------------------------


def _rewrites(renderer: Renderer) -> bool:
    """True where a further question makes the template drop the reasoning, or the opening, of the completion before it."""
    asked: list[JSON] = [{"role": "user", "content": "x"}]
    inline: JSON = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    apart: JSON = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    try:
        before = renderer.render(asked, None, generate=True)
        for answer in (inline, apart):
            last = renderer.render([*asked, answer], None, generate=False)
            followed = renderer.render([*asked, answer, *asked], None, generate=True)
            if not followed.startswith(before) or (THOUGHT in last and THOUGHT not in followed):
                return True
    except InputError:
        return False  # where a template takes no second question, none rewrites anything
    return False


def _answer_end(renderer: Renderer, calls: bool) -> str | None:
    """The text that the template writes after ANSWER at a completion's end, its closing last; None where it is unknown."""
    try:
        whole = renderer.render(_history([{"role": "tool", "content": ""}] if calls else []), None, generate=False)
    except InputError:
        return None
    _, found, end = whole.partition(ANSWER)
    return end if found and renderer.closing is not None and end.endswith(renderer.closing) else None


def _history(results: list[JSON]) -> list[JSON]:
    """A question and a completion whose last text is ANSWER: the argument of a call, where there are results of calls."""
    calls = [_call(str(result.get("tool_call_id", "")), "x") for result in results[:-1]]
    calls += [_call(str(result.get("tool_call_id", "")), ANSWER) for result in results[-1:]]
    answer: JSON = {"role": "assistant", "content": "" if calls else ANSWER}
    return [{"role": "user", "content": "x"}, answer | ({"tool_calls": calls} if calls else {})]


def _call(call_id: str, word: str) -> JSON:
    return {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}


# --- what the family does -----------------------------------------------------------------------------------------


def _differing(renderer: Renderer, known: FamilyRenderer) -> str | None:
    """The first probe that the family encodes differently from the template; None where there is none. The opening of a
    completion after results may differ (DeepSeek's template has none there): `bridge` compares it each time."""
    for name, messages, tools in _probes():
        if tools is not None and renderer.tool_text is not None:
            continue  # no family has these prompts; `bridge` compares where a turn goes on after results
        for opens in (True, False) if messages[-1]["role"] == "tool" else (True,):
            try:
                expected = renderer.encode(renderer.render(messages, tools, generate=opens))
            except InputError:
                if tools is None:
                    return name
                break  # some templates know no tools; nothing will be continued that they refuse
            if known.render_ids(messages, tools=tools, add_generation_prompt=opens) == expected:
                break
        else:
            return name
    return None


def _probes() -> Iterator[tuple[str, list[JSON], list[JSON] | None]]:
    """Conversations, by name, with tools or without. No completion has several calls: how a family writes these does not
    matter, since what was sampled is never written again."""
    system: JSON = {"role": "system", "content": "Be brief."}
    user: JSON = {"role": "user", "content": " What is it?\n"}
    other: JSON = {"role": "user", "content": "And then?"}
    said: JSON = {"role": "assistant", "content": "It is 42."}
    thought: JSON = said | {"reasoning_content": "Hm."}
    called: JSON = {"role": "assistant", "content": "", "tool_calls": [_call("a", 'é "y"')]}
    results: list[JSON] = [
        {"role": "tool", "tool_call_id": "a", "content": '{"rows": [1]}'},
        {"role": "tool", "tool_call_id": "b", "content": " none\n"},
    ]
    yield "a question", [user], None
    yield "a system message", [system, user], None
    yield "a second question", [system, user, said, other], None
    yield "a question after thinking", [user, thought, other], None
    for messages in ([user], [system, user], [system, user, said, other]):
        yield "a list of tools", messages, _tools()
    yield "a result", [user, called, results[0]], _tools()
    yield "a result after thinking", [user, called | {"reasoning_content": "Hm."}, results[0]], _tools()
    yield "two results", [system, user, called | {"content": "Wait."}, *results], _tools()
    yield "a question after results", [system, user, called, results[0], said, other], _tools()


def _tools() -> list[JSON]:
    word, times = {"type": "string", "description": "what"}, {"type": "integer"}
    parameters = {"type": "object", "properties": {"word": word, "times": times}, "required": ["word"]}
    function = {"name": "look_up", "description": "Looks it up.", "parameters": parameters}
    return [{"type": "function", "function": function}]


class _Tokens:
    """A tokenizer in the form that `renderers` asks for."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index
