"""Store records to trajectories: full prompts are rebuilt from parents and suffixes, step rewards join their transition.

The trainer drives it with the records of finished rollouts. It knows nothing of credit, advantages or engines, and
judges nothing: a rollout that cannot be learned from is left out with the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from agentlightning.store.base import final_reward
from agentlightning.types import ABANDONED, JSON, Call, Reward, Rollout, Trajectory, Transition

JUDGE = "agl.judge"
"""`agent` of a call by which a reward function asked a model about the rollout: nothing learns from it."""


def trajectories(
    rollouts: Iterable[Rollout],
    calls: Iterable[Call],
    rewards: Iterable[Reward] = (),
    *,
    keep_unrewarded: bool = False,
) -> tuple[list[Trajectory], dict[str, str]]:
    """Trajectories in the order of `rollouts`, and the id and reason of each rollout that was left out.

    Only calls and rewards of a rollout's latest attempt count (the one that succeeded); `calls` come in the order
    they finished. Posted rewards count until the rollout finished, and what it was rescored with never does: a later
    one would make a step that is executed again another step. With `keep_unrewarded` a rollout that succeeded without
    a final reward is kept, with NaN. A call is trained where the policy sampled it and the agent read it: one that an
    outside model answered (policy '') is context at most, and so are an abandoned one and a judge's. Costs O(tokens of
    all full prompts): each prompt is built once, from its parent's.

    A conversation of two calls, the second stored by its suffix alone:

        call a: suffix [1, 2], sampled [3]             transition a: prompt [1, 2],       sampled [3]
        call b: parent a, suffix [4], sampled [5, 6]   transition b: prompt [1, 2, 3, 4], sampled [5, 6]
    """
    calls_of: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        calls_of[call.rollout_id].append(call)
    rewards_of: defaultdict[str, list[Reward]] = defaultdict(list)
    for reward in rewards:
        rewards_of[reward.rollout_id].append(reward)
    kept: list[Trajectory] = []
    left_out: dict[str, str] = {}
    for rollout in rollouts:
        attempt = [call for call in calls_of[rollout.id] if call.attempt == rollout.attempt]
        told = [reward for reward in rewards_of[rollout.id] if _counts(reward, rollout)]
        reason, transitions = _transitions(attempt, _by_call(told))
        if rollout.reward is None and not (keep_unrewarded and rollout.state == "succeeded"):
            left_out[rollout.id] = "it has no reward"
        elif reason is not None:
            left_out[rollout.id] = reason
        else:
            kept.append(
                Trajectory(
                    rollout_id=rollout.id,
                    group_id=rollout.group_id,
                    reward=math.nan if rollout.reward is None else rollout.reward,
                    transitions=transitions,
                    rewards=final_rewards(told),
                    failed=rollout.state == "failed",
                )
            )
    return kept, left_out


def _counts(reward: Reward, rollout: Rollout) -> bool:
    late = reward.source == "posted" and rollout.finished_ns is not None and reward.created_ns > rollout.finished_ns
    return reward.attempt == rollout.attempt and reward.source != "rescored" and not late


def named_rewards(rewards: Iterable[Reward], name: str) -> dict[tuple[str, int], float]:
    """The final reward of this name by rollout and attempt, rescored ones included: the last one counts."""
    return {
        (reward.rollout_id, reward.attempt): reward.value
        for reward in rewards
        if reward.name == name and reward.call_id is None and reward.source != "air"
    }


def _by_call(rewards: Iterable[Reward]) -> dict[str, dict[str, float]]:
    """Step rewards by call and name; several of one name are summed."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for reward in rewards:
        if reward.call_id is not None:
            found[reward.call_id][reward.name] += reward.value
    return {call: dict(named) for call, named in found.items()}


def final_rewards(rewards: Iterable[Reward]) -> dict[str, float]:
    """Final rewards of one attempt by name, each settled as the rollout's own is."""
    named: defaultdict[str, list[Reward]] = defaultdict(list)
    for reward in rewards:
        if reward.call_id is None:
            named[reward.name].append(reward)
    settled = {name: final_reward(records) for name, records in named.items()}
    return {name: value for name, value in settled.items() if value is not None}


def _transitions(attempt: list[Call], step_rewards: dict[str, dict[str, float]]) -> tuple[str | None, list[Transition]]:
    """Why these calls cannot be trained (None where they can), and their transitions."""
    by_id = {call.id: call for call in attempt}
    prompts: dict[str, list[int]] = {}
    messages: dict[str, list[JSON]] = {}
    transitions = []
    for call in attempt:
        missing = _build_prompt(call, by_id, prompts, messages)
        if missing is not None:
            return f"call {call.id} continues call {missing}, which is not recorded", []
        prompt = prompts[call.id]
        if not call.policy or call.finish_reason == ABANDONED or call.agent == JUDGE:
            continue
        if not call.sampled_ids or not prompt:  # without a prompt, the first token has no condition
            continue
        if len(prompt) != call.prompt_tokens or len(call.logprobs) != len(call.sampled_ids):
            return (
                f"call {call.id} is recorded with {call.prompt_tokens} prompt tokens and {len(call.logprobs)} logprobs, "
                f"but its parts have {len(prompt)} prompt tokens and {len(call.sampled_ids)} sampled ones"
            ), []
        transitions.append(
            Transition(
                call_id=call.id,
                prompt_ids=prompt,
                sampled_ids=call.sampled_ids,
                logprobs=call.logprobs,
                versions=call.versions,
                # greedy calls are recorded with the logprobs of temperature 1
                temperature=call.sampling.temperature or 1.0,
                policy=call.policy,
                agent=call.agent,
                reward=sum(step_rewards.get(call.id, {}).values()),
                rewards=step_rewards.get(call.id, {}),
                messages=messages[call.id],
                answer=call.answer,
            )
        )
    return (None if transitions else "the policy answered none of its calls"), transitions


def _build_prompt(
    call: Call, by_id: dict[str, Call], prompts: dict[str, list[int]], messages: dict[str, list[JSON]]
) -> str | None:
    """Put the full prompt of `call`, and of each ancestor that lacks one, into `prompts`, and as messages into
    `messages`; the id of a missing parent."""
    chain: list[Call] = []
    node = call
    while node.id not in prompts:
        chain.append(node)
        if node.parent_id is None:
            break
        parent = by_id.get(node.parent_id)
        if parent is None:
            return node.parent_id
        node = parent
    for link in reversed(chain):
        if link.parent_id is None:
            prompts[link.id], messages[link.id] = list(link.suffix_ids), link.messages
            continue
        parent = by_id[link.parent_id]
        prompts[link.id] = prompts[parent.id] + parent.sampled_ids + link.suffix_ids
        messages[link.id] = [*messages[parent.id], parent.answer, *link.messages]
    return None
