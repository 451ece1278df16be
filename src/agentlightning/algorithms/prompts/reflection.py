"""Requests to the optimiser model as text, and what is read from its answers.

Searches drive it. Rollouts become text of a bounded length, which says how much was cut; an answer is a text between
fences, or nothing that can be used. Pure: knows neither models nor stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.algorithms.prompts.search import Trace

MAX_ROLLOUTS_CHARACTERS = 24_000
"""Of all rollouts of one request."""
MAX_ROLLOUT_CHARACTERS = 8_000
MAX_TRIED_CHARACTERS = 2_000
"""Of each text that was tried before."""
MAX_TRIED = 6
"""Texts that one request shows, those tried last."""
MAX_CRITIQUE_CHARACTERS = 8_000
MAX_CUT_NOTE = 40

CURRENT = "# The text now"
ROLLOUTS = "# Rollouts with it"
TRIED = "# Texts that were tried in its place"
CRITIQUE = "# Critique of it"
OUTCOME = "### Outcome"
ANSWER_WITH_TEXT = "Answer with the whole new text between two lines of three backticks (```)."
ANSWER_WITH_CRITIQUE = "Answer with a short list of its faults, in general terms, without a new text."
_OPENING = (
    "You improve a prompt of an AI agent: its text `{name}`. {what}\n"
    "Names in braces, such as {{question}} or {{{{ question }}}}, are placeholders for the fields of a task: keep each of "
    "them as it is, and add none.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedText:
    """A text that raced against the current one."""

    text: str
    wins: int
    """Tasks on which it earned more."""
    losses: int
    ties: int


def clipped(text: str, limit: int) -> str:
    """The text, or its beginning and its end with a note of what was cut between them: at most `limit` characters.

    >>> clipped("a" * 30 + "b" * 70, 60)
    'aaaaaaaaaa\\n[80 characters cut]\\nbbbbbbbbbb'
    """
    if len(text) <= limit:
        return text
    half = max(0, limit - MAX_CUT_NOTE) // 2
    cut = len(text) - 2 * half
    return f"{text[:half]}\n[{cut:,} characters cut]\n{text[len(text) - half :]}"


def fenced(text: str) -> str:
    """The text between fences that are longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def new_text(answer: str) -> str | None:
    """The text between the first and the last fence of an answer; None where there is none, or it is empty.

    A word after the opening fence, such as ``text``, names a language and is left out. Fences inside stay.
    """
    lines = answer.splitlines()
    fences = [place for place, line in enumerate(lines) if re.fullmatch(r"`{3,}\s*[\w-]*", line.strip())]
    if len(fences) < 2:
        return None
    return "\n".join(lines[fences[0] + 1 : fences[-1]]).strip() or None


def rollouts_text(traces: Sequence[Trace]) -> str:
    """The rollouts in order, each with its task, its steps, its reward, its error and the words of the reward function."""
    limit = min(MAX_ROLLOUT_CHARACTERS, MAX_ROLLOUTS_CHARACTERS // max(1, len(traces)))
    return "\n\n".join(
        f"## Rollout {number}, reward {trace.score.reward:g}\n{_rollout(trace, limit)}"
        for number, trace in enumerate(traces, 1)
    )


def _rollout(trace: Trace, limit: int) -> str:
    score = trace.score
    failure = [f"The rollout failed: {score.error}"] if score.error else []
    outcome = "\n".join([*failure, *([score.feedback] if score.feedback else [])]) or "No words."
    task, outcome = clipped(trace.task, limit // 4), clipped(outcome, limit // 4)
    steps = clipped("\n".join(trace.steps) or "None.", limit // 2)
    return f"### Task\n{task}\n### Steps\n{steps}\n{OUTCOME}\n{outcome}"


def reflection_prompt(name: str, text: str, rollouts: str, tried: Sequence[TriedText] = ()) -> str:
    """The request of GEPA: a better text, from what happened with this one."""
    what = (
        "Read what the agent did with it, and why that earned what it earned. Find what the text leaves out, or has wrong; "
        "facts of the domain, formats and strategies that would have helped belong into the new text."
    )
    return _joined(name, what, text, f"{ROLLOUTS}\n{rollouts}", _tried(tried), ANSWER_WITH_TEXT)


def critique_prompt(name: str, text: str, rollouts: str) -> str:
    """The request for a textual gradient: the faults of this text."""
    what = "Read what the agent did with it, and say which faults of the text explain the low rewards."
    return _joined(name, what, text, f"{ROLLOUTS}\n{rollouts}", "", ANSWER_WITH_CRITIQUE)


def edit_prompt(name: str, text: str, critique: str, tried: Sequence[TriedText] = ()) -> str:
    """The request to apply a textual gradient."""
    what = "A critique names its faults. Write a text without them, and change nothing that is not at fault."
    given = f"{CRITIQUE}\n{clipped(critique, MAX_CRITIQUE_CHARACTERS)}"
    return _joined(name, what, text, given, _tried(tried), ANSWER_WITH_TEXT)


def _tried(tried: Sequence[TriedText]) -> str:
    if not tried:
        return ""
    shown = [
        f"Better on {one.wins} tasks, worse on {one.losses}, equal on {one.ties}:\n"
        f"{fenced(clipped(one.text, MAX_TRIED_CHARACTERS))}"
        for one in tried[-MAX_TRIED:]
    ]
    left_out = f"\n{len(tried) - MAX_TRIED} earlier ones are left out." if len(tried) > MAX_TRIED else ""
    return "\n\n".join([f"{TRIED}{left_out}", *shown])


def _joined(name: str, what: str, text: str, *parts: str) -> str:
    opening = _OPENING.format(name=name, what=what)
    return "\n\n".join(part for part in (opening, f"{CURRENT}\n{fenced(text)}", *parts) if part)
