"""Causes of a low reward that a sample of rollouts shows by itself, each as a sentence with what to change.

`agl check` says them. Pure: knows rollouts and their calls, no store and no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.records import Call, Rollout
from agentlightning.store.scan import by_attempt

MIN_SHARE = 0.5
"""A cause is said where it holds for at least this share of the calls or rollouts."""
MIN_ALIKE = 4
"""Rollouts that have to be alike: fewer may be by chance."""
MAX_SHOWN = 120
"""Characters of an error or a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rollouts of different tasks, executed alike, with the calls of their last attempts."""

    rollouts: Sequence[Rollout]
    calls: Sequence[Call]
    max_tokens: int | None = None
    """`model.max_tokens` of the run."""


def causes(sample: Sample) -> list[str]:
    """The sentences of all causes that hold."""
    return [sentence for cause in CAUSES if (sentence := cause(sample)) is not None]


def failed(sample: Sample) -> str | None:
    return _failed(sample, [one for one in sample.rollouts if one.judged], "counts as 0")


def not_judged(sample: Sample) -> str | None:
    return _failed(
        sample, [one for one in sample.rollouts if not one.judged], "is not the agent's doing and does not count"
    )


def _failed(sample: Sample, rollouts: Sequence[Rollout], so: str) -> str | None:
    errors = [one.error or "an unknown error" for one in rollouts if one.state != "succeeded"]
    if not errors:
        return None
    last_lines = Counter(error.strip().splitlines()[-1][:MAX_SHOWN] for error in errors)
    (line, _) = last_lines.most_common(1)[0]
    return f"{_of(len(errors), len(sample.rollouts), 'rollout')} failed, which {so}, most with: {line}"


def unrewarded(sample: Sample) -> str | None:
    bare = sum(one.state == "succeeded" and one.reward is None for one in sample.rollouts)
    if not bare:
        return None
    return f"{_of(bare, len(sample.rollouts), 'rollout')} ended without a reward, which counts as 0: return or emit one"


def cut(sample: Sample) -> str | None:
    lengths = [len(call.sampled_ids) for call in sample.calls if call.finish_reason == "length"]
    if not lengths or len(lengths) < MIN_SHARE * len(sample.calls):
        return None
    count = _of(len(lengths), len(sample.calls), "completion", "was", "were")
    if min(lengths) != max(lengths):
        return f"{count} cut by the end of the context: shorten the prompts, or set model.max_tokens"
    whose = "model.max_tokens" if lengths[0] == sample.max_tokens else "the agent's max_tokens"
    return f"{count} cut by max_tokens = {lengths[0]}: raise {whose}, or ask for shorter answers"


def empty(sample: Sample) -> str | None:
    bare = sum(not _text(call) and not call.completion.get("tool_calls") for call in sample.calls)
    if not bare or bare < MIN_SHARE * len(sample.calls):
        return None
    count = _of(bare, len(sample.calls), "completion", "was", "were")
    return f"{count} empty: the model ends at once; is its chat template the one that it was trained with?"


def no_tool_called(sample: Sample) -> str | None:
    offered = {call.rollout_id for call in sample.calls if call.tools}
    if not offered or any(call.completion.get("tool_calls") for call in sample.calls):
        return None
    return (
        f"no completion calls a tool, though {_of(len(offered), len(sample.rollouts), 'rollout')} offered some: show one "
        "in the system message, or warm-start the model on calls"
    )


def one_prompt(sample: Sample) -> str | None:
    firsts = [orjson.dumps(calls[0].messages) for calls in by_attempt(sample.calls).values()]
    if len(firsts) < MIN_ALIKE or len(set(firsts)) > 1:
        return None
    return f"all {len(firsts)} rollouts begin with the same prompt: does the agent put its task into it?"


def one_completion(sample: Sample) -> str | None:
    lasts = [_text(calls[-1]) for calls in by_attempt(sample.calls).values()]
    if len(lasts) < MIN_ALIKE or len(set(lasts)) > 1 or not lasts[0]:
        return None
    return (
        f"all {len(lasts)} rollouts end with the same completion, {lasts[0][:MAX_SHOWN]!r}: nothing could be compared"
    )


def overridden(sample: Sample) -> str | None:
    names = sorted({name for call in sample.calls for name in call.overridden_params})
    if not names:
        return None
    return f"the agent's {', '.join(names)} not applied: a training run samples as [model] says"


CAUSES: tuple[Callable[[Sample], str | None], ...] = (
    *(failed, not_judged, unrewarded, cut, empty, no_tool_called, one_prompt, one_completion, overridden),
)


def _of(count: int, total: int, what: str, one: str = "", many: str = "") -> str:
    """
    >>> _of(3, 3, "completion", "was", "were"), _of(2, 3, "completion", "was", "were"), _of(1, 4, "rollout")
    ('every completion was', '2 of 3 completions were', '1 of 4 rollouts')
    """
    return f"every {what} {one}".strip() if count == total else f"{count} of {total} {what}s {many}".strip()


def _text(call: Call) -> str:
    content: Any = call.completion.get("content")
    return (content if isinstance(content, str) else orjson.dumps(content).decode() if content else "").strip()
