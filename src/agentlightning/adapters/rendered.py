"""Recorded calls as if this model had made them: messages and answers, rendered by its own template.

The offline trainer drives it to distil: a call that an outside model answered has text and no token ids, and one of another
policy has ids of another tokenizer. A conversation graph makes each prompt exactly as the gateway would, so that calls that
continue each other become one row. Nothing is guessed: what the template does not write as the continuation of its own
opening is left out, with the reason. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.rendering.conversation import COMPLETIONS, Conversation
from agentlightning.rendering.message import normal
from agentlightning.rendering.renderer import Renderer, RenderError
from agentlightning.types import ABANDONED, JSON, Call, Rollout, Trajectory, Transition

CUT = "length"
"""`finish_reason` of an answer that a limit cut: its end is not taught."""


def rendered(
    rollout: Rollout, calls: Iterable[Call], renderer: Renderer, taught: Callable[[Call], bool]
) -> Trajectory | str:
    """The rollout with a transition for each of its calls that is `taught`; the reason where there is none.

    Only calls of the latest attempt count; `calls` come in the order they finished. The sampler's logprobs are not known and
    stand as 0, which no loss of imitation reads. The reward is NaN where none is known.
    """
    attempt = [call for call in calls if call.attempt == rollout.attempt]
    by_id = {call.id: call for call in attempt}
    conversation = Conversation(renderer)
    transitions = []
    for call in attempt:
        if call.finish_reason == ABANDONED or call.agent == JUDGE or not taught(call):
            continue
        path = _path(call, by_id)
        if isinstance(path, str):
            return path
        messages = [message for step in path for message in ([*step.messages, step.answer])][:-1]
        if call.protocol == COMPLETIONS:
            return f"call {call.id} has a raw prompt, which belongs to the model that was asked"
        try:
            plan = conversation.plan(messages, path[0].tools)
            answer_ids = _answer_ids(call, messages, path[0].tools, plan.prompt_ids, renderer)
        except RenderError as refusal:
            return f"call {call.id}: {refusal}"
        if answer_ids is None:
            return f"call {call.id}: the model's chat template writes an answer otherwise than it opens one"
        conversation.record(plan, call.id, answer_ids, call.answer)
        if answer_ids:
            transitions.append(_transition(call, plan.prompt_ids, answer_ids, messages))
    if not transitions:
        return "the teacher answered none of its calls"
    reward = math.nan if rollout.reward is None else rollout.reward
    return Trajectory(rollout_id=rollout.id, group_id=rollout.group_id, reward=reward, transitions=transitions)


def _path(call: Call, by_id: dict[str, Call]) -> list[Call] | str:
    """The calls from the first of the conversation to this one; the reason where one is missing."""
    path = [call]
    while path[-1].parent_id is not None:
        parent = by_id.get(path[-1].parent_id)
        if parent is None:
            return f"call {path[-1].id} continues call {path[-1].parent_id}, which is not recorded"
        path.append(parent)
    return path[::-1]


def _answer_ids(
    call: Call, messages: list[JSON], tools: list[JSON] | None, prompt_ids: list[int], renderer: Renderer
) -> list[int] | None:
    """What the model would have sampled, with the token that ends it; None where the template cannot tell."""
    view = [normal(message) for message in messages]
    opening = renderer.render(view, tools, generate=True)
    whole = renderer.render([*view, normal(call.answer)], tools, generate=False)
    if not whole.startswith(opening):
        return None
    ids = renderer.encode(whole[len(opening) :], after=prompt_ids[-1] if prompt_ids else None)
    ends = [place for place, token in enumerate(ids) if token in renderer.end_ids]
    if ends:
        ids = ids[: ends[-1] + 1]
    elif renderer.end_ids:  # the template never writes one, and the model has to learn to stop all the same
        ids = [*ids, next(iter(renderer.end_ids))]
    return renderer.split_end(ids)[0] if call.finish_reason == CUT else ids


def _transition(call: Call, prompt_ids: list[int], answer_ids: list[int], messages: list[JSON]) -> Transition:
    return Transition(
        call_id=call.id,
        prompt_ids=prompt_ids,
        sampled_ids=answer_ids,
        logprobs=[0.0] * len(answer_ids),
        versions=[],
        policy=call.policy,
        agent=call.agent,
        messages=messages,
        answer=call.answer,
    )
