"""Recorded calls as if this model had made them: messages and completions, rendered by its own template.

The offline trainer drives it to distil: a call that an external model answered has text and no token ids, and one of another
policy has ids of another tokenizer. A conversation graph makes each prompt exactly as the gateway would, so that calls that
continue each other become one row. Nothing is guessed: what the template does not write as the continuation of its own
opening is left out, with the reason. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.records import Call, Rollout
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_tools, is_whole
from agentlightning.rendering.conversation import RAW_PROMPTS, Conversation
from agentlightning.rendering.graph import RequestView, normal
from agentlightning.rendering.renderer import Renderer, RenderError
from agentlightning.training_types import Trajectory, Transition

CUT = "length"
"""`finish_reason` of a completion that a limit cut: its end is not taught."""


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
    made: dict[str, Transition] = {}
    transitions = []
    for call in attempt:
        if not call.learnable or call.agent == JUDGE or not taught(call):
            continue
        chain = call_chain(call, by_id)
        if not is_whole(chain):
            return f"call {chain[0].id} continues call {chain[0].parent_id}, which is not recorded"
        messages, tools = chain_prompt(chain), chain_tools(chain)
        if call.protocol in RAW_PROMPTS:
            return f"call {call.id} has a raw prompt, which belongs to the model that was asked"
        try:
            view = RequestView.of(messages, tools)
            plan = conversation.plan(view)
            completion_ids = renderer.completion_ids(plan.prompt_ids, view.normal, tools, normal(call.completion))
        except RenderError as refusal:
            return f"call {call.id}: {refusal}"
        if completion_ids is None:
            return f"call {call.id}: the model's chat template writes an answer otherwise than it opens one"
        if call.finish_reason == CUT:
            completion_ids, _ = renderer.split_end(completion_ids)
        conversation.record(plan, call.id, completion_ids, call.completion)
        made[call.id] = Transition(
            call_id=call.id,
            suffix_ids=plan.suffix_ids,
            sampled_ids=completion_ids,
            logprobs=[0.0] * len(completion_ids),
            versions=[],
            policy=call.policy,
            agent=call.agent,
            messages=view.messages[plan.known :],
            completion=call.completion,
            parent=None if plan.parent is None else made[plan.parent.call_id],
        )
        if completion_ids:
            transitions.append(made[call.id])
    if not transitions:
        return "the teacher answered none of its calls"
    reward = math.nan if rollout.reward is None else rollout.reward
    return Trajectory(rollout_id=rollout.id, group_id=rollout.group_id, reward=reward, transitions=transitions)
