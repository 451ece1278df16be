"""A rollout as text: the conversation, call by call, with its tokens and rewards.

Driven by ``agl rollouts show``, ``agl check`` and notebooks. Knows no stores.
"""

from __future__ import annotations

from itertools import groupby

import orjson
from rich.console import Console
from rich.text import Text

from agentlightning.adapters.side_calls import side_calls
from agentlightning.errors import printable
from agentlightning.records import JSON, Attempt, Call, Fork, Reward, Rollout
from agentlightning.store.forks import replay_warning
from agentlightning.store.scan import by_attempt


def print_rollout(
    console: Console,
    rollout: Rollout,
    attempts: list[Attempt],
    calls: list[Call],
    rewards: list[Reward],
    tokens: bool = False,
    feedback: str = "",
) -> None:
    """Print one rollout for a person."""
    console.print(
        f"rollout {rollout.id}  {rollout.mode}  step {rollout.step}  {rollout.state}  attempt {rollout.attempt}",
        soft_wrap=True,
    )
    console.print(f"task {orjson.dumps(rollout.task).decode()}", soft_wrap=True)
    if fork := rollout.fork:
        console.print(f"fork of rollout {fork.rollout_id}, attempt {fork.attempt}, {fork_place(fork)}", soft_wrap=True)
    if warning := replay_warning(rollout, calls):
        console.print(warning, soft_wrap=True, style="yellow")
    beside = {name: kind for own in by_attempt(calls).values() for name, kind in side_calls(own).items()}
    for number, call, more in [(n, call, 0) for n, call in enumerate(calls, 1)] if tokens else _folded(calls):
        print_call(console, number, call, tokens, beside.get(call.id, ""))
        if more:
            console.print(f"── calls {number + 1} to {number + more}: the same messages again", style="dim")
    console.print("──", style="dim")
    for reward in rewards:
        where = f" on call {reward.call_id}" if reward.call_id else ""
        line = f"reward {reward.name} {reward.value:g} ({reward.source}, attempt {reward.attempt}){where}"
        console.print(line, soft_wrap=True)
    console.print(f"final reward {rollout.reward}  outcome {rollout.outcome or 'none'}")
    print_feedback(console, feedback)
    if rollout.warning:
        console.print(rollout.warning, soft_wrap=True, style="yellow")
    for attempt in attempts:
        console.print(f"attempt {attempt.attempt}  {attempt.state}  {attempt.worker_id}", soft_wrap=True)
        for title, text in (("error", attempt.error), ("output", attempt.output)):
            if text and not (title == "output" and attempt.error and text.strip() in attempt.error):
                console.print(f"  {title}: {text.strip()}", soft_wrap=True, style="yellow")


def _place(row: tuple[int, Call]) -> tuple[object, ...]:
    """Equal for calls that a loop without an end makes; a fork or another policy is shown."""
    call = row[1]
    return call.agent, call.policy, call.fork_cause, call.messages


def _folded(calls: list[Call]) -> list[tuple[int, Call, int]]:
    """(number, call, how many after it are folded): of calls in a row with equal messages, the first and the last."""
    rows = [[*found] for _, found in groupby(enumerate(calls, 1), _place)]
    shown = []
    for row in rows:
        shown.append((*row[0], max(0, len(row) - 2)))
        shown += [(*row[-1], 0)] if len(row) > 1 else []
    return shown


def print_feedback(console: Console, feedback: str) -> None:
    """Print the words that came with a reward, which are somebody's text."""
    if feedback:
        console.print(Text(f"feedback: {printable(feedback)}", style="magenta"), soft_wrap=True)


def print_call(console: Console, number: int, call: Call, tokens: bool = False, beside: str = "") -> None:
    """Print one call: by whom, with which weights, what it added to the conversation and what was said. `beside`: what a
    side call looks like."""
    version = ", ".join(f"v{span.version}" for span in call.versions)
    cause = f"  fork: {call.fork_cause}" if call.fork_cause else ""
    if call.untrained_tokens:
        cause += f" ({call.untrained_tokens} sampled tokens are context only)"
    by = (f" by {call.agent}" if call.agent else "") + (f"  beside the task ({beside})" if beside else "")
    if call.replayed_id is not None:
        by += "  replayed" if call.versions else "  given"
    console.print(
        f"── call {number}{by}  {call.policy or call.model}  "
        + (_external(call) if not call.policy else f"{version}  {_sampled(call)}{cause}"),
        soft_wrap=True,
        style="dim",
    )
    if call.decoding:
        console.print(f"  decoding: {decoding_line(call.decoding)}", soft_wrap=True, style="dim")
    for message in (*call.messages, call.completion):
        console.print(_message(message), soft_wrap=True)
    if tokens:
        for token, logprob in zip(call.sampled_ids, call.logprobs, strict=True):
            console.print(f"    {token:>8}  {logprob:9.4f}")


def fork_place(fork: Fork) -> str:
    """The place at which a fork leaves the rollout that it continues.

    >>> fork_place(Fork(rollout_id="r", attempt=1, calls=1, root_id="r"))
    'after 1 call'
    """
    return f"after {fork.calls} call{'' if fork.calls == 1 else 's'}"


def decoding_line(decoding: JSON) -> str:
    """Names what was done to the logits of a call, without the text of its grammar; `forced` counts tokens.

    >>> decoding_line({"grammar": {"kind": "choice", "lark": "…"}, "forced": [[0, 2]], "logits": {"top_k": 3}})
    'grammar choice, forced 2, top_k 3'
    >>> decoding_line({"logits": {"logit_bias": {"5": 1.0}, "stop_token_ids": [7], "ignore_eos": True}, "untrained": True})
    'logit_bias of 1, stop_token_ids of 1, ignore_eos, not learned from'
    """
    said = []
    if grammar := decoding.get("grammar"):
        said.append(f"grammar {grammar['kind']}")
    if forced := sum(end - start for start, end in decoding.get("forced", ())):
        said.append(f"forced {forced}")
    for name, value in decoding.get("logits", {}).items():
        of = f" of {len(value)}" if isinstance(value, dict | list) else "" if value is True else f" {value:g}"
        said.append(name + of)
    if decoding.get("untrained"):
        said.append("not learned from")
    return ", ".join(said)


def content_text(content: object) -> str:
    """The content of a message as text: an image by the beginning of its hash, and what is of no known kind as JSON.

    >>> content_text([{"type": "image", "image": "caa496709d1f"}, {"type": "text", "text": "what is it ?"}, {"type": "x"}])
    '[image caa49670] what is it ? {"type":"x"}'
    """
    if isinstance(content, list):
        return " ".join(_part(part) for part in content)
    return content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()


def _part(part: object) -> str:
    given = part if isinstance(part, dict) else {}
    if isinstance(text := given.get("text"), str) and given.get("type") == "text":
        return text
    if isinstance(name := given.get("image"), str) and given.get("type") == "image":
        return f"[image {name[:8]}]"
    return orjson.dumps(part).decode()


def _sampled(call: Call) -> str:
    return (
        f"prompt {call.prompt_tokens} tokens  sampled {len(call.sampled_ids)}  logprob {sum(call.logprobs):.2f}  "
        f"T={call.sampling.temperature:g}"
    )


def _external(call: Call) -> str:
    """Usage that an external model reported for its call, if any."""
    used = [
        f"{what} {call.usage[name]} tokens"
        for what, name in (("prompt", "prompt_tokens"), ("sampled", "sampled_tokens"))
        if call.usage.get(name)
    ]
    return "  ".join([*used, "text only"])


def _message(message: dict[str, object]) -> Text:
    role = str(message.get("role", ""))
    style = {"assistant": "bold green", "user": "cyan", "system": "magenta", "tool": "blue"}.get(role, "")
    line = Text.assemble((f"{role:>9} ", style), content_text(message.get("content")))
    if calls := message.get("tool_calls"):
        line.append(" " + orjson.dumps(calls).decode(), style="dim")
    return line
