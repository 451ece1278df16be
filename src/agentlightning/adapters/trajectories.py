"""Store records to trajectories: full prompts are rebuilt from parents and suffixes, step rewards join their transition.

The trainer drives it with the records of finished rollouts. It knows nothing of credit, advantages or engines, and
judges nothing: a rollout that cannot be learned from is left out with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from agentlightning.types import Call, Reward, Rollout, Trajectory, Transition

ABANDONED = "abandoned"
"""`finish_reason` of a call whose agent went away: what it did next does not follow from what was sampled."""


def trajectories(
    rollouts: Iterable[Rollout], calls: Iterable[Call], rewards: Iterable[Reward] = ()
) -> tuple[list[Trajectory], dict[str, str]]:
    """Trajectories in the order of `rollouts`, and the id and reason of each rollout that was left out.

    Only calls and rewards of a rollout's latest attempt count (the one that succeeded); `calls` come in the order they
    finished. A call is trained where the policy sampled it and the agent read it: one that an outside model answered
    (policy '') is context at most, and so is an abandoned one. Costs O(tokens of all full prompts): each prompt is built
    once, from its parent's.

    A conversation of two calls, the second stored by its suffix alone:

        call a: suffix [1, 2], sampled [3]             transition a: prompt [1, 2],       sampled [3]
        call b: parent a, suffix [4], sampled [5, 6]   transition b: prompt [1, 2, 3, 4], sampled [5, 6]
    """
    calls_of: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        calls_of[call.rollout_id].append(call)
    step_rewards: defaultdict[str, float] = defaultdict(float)
    for reward in rewards:
        if reward.call_id is not None:
            step_rewards[reward.call_id] += reward.value
    kept: list[Trajectory] = []
    left_out: dict[str, str] = {}
    for rollout in rollouts:
        attempt = [call for call in calls_of[rollout.id] if call.attempt == rollout.attempt]
        reason, transitions = _transitions(attempt, step_rewards)
        if rollout.reward is None:
            left_out[rollout.id] = "it has no reward"
        elif reason is not None:
            left_out[rollout.id] = reason
        else:
            kept.append(
                Trajectory(
                    rollout_id=rollout.id, group_id=rollout.group_id, reward=rollout.reward, transitions=transitions
                )
            )
    return kept, left_out


def _transitions(attempt: list[Call], step_rewards: dict[str, float]) -> tuple[str | None, list[Transition]]:
    """Why these calls cannot be trained (None where they can), and their transitions."""
    by_id = {call.id: call for call in attempt}
    prompts: dict[str, list[int]] = {}
    transitions = []
    for call in attempt:
        missing = _build_prompt(call, by_id, prompts)
        if missing is not None:
            return f"call {call.id} continues call {missing}, which is not recorded", []
        prompt = prompts[call.id]
        if not call.policy or call.finish_reason == ABANDONED:
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
                reward=step_rewards.get(call.id, 0.0),
            )
        )
    return (None if transitions else "the policy answered none of its calls"), transitions


def _build_prompt(call: Call, by_id: dict[str, Call], prompts: dict[str, list[int]]) -> str | None:
    """Put the full prompt of `call`, and of each ancestor that lacks one, into `prompts`; the id of a missing parent."""
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
        before = [] if link.parent_id is None else prompts[link.parent_id] + by_id[link.parent_id].sampled_ids
        prompts[link.id] = before + link.suffix_ids
    return None
