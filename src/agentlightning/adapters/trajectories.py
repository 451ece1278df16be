"""Store records to trajectories: calls become transitions of the same tree, step rewards join their transition.

The trainer drives it with the records of finished rollouts. It knows nothing of credit, advantages or engines, and
judges nothing: a rollout that cannot be learned from is left out with the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from agentlightning.records import Call, Reward, Rollout
from agentlightning.store.rules import final_reward
from agentlightning.store.scan import by_attempt
from agentlightning.training_types import ImageInput, Trajectory, Transition

JUDGE = "agl.judge"
"""`agent` of a call by which a reward function asked a model about the rollout: nothing learns from it."""


def trajectories(
    rollouts: Iterable[Rollout],
    calls: Iterable[Call],
    rewards: Iterable[Reward] = (),
    *,
    keep_unrewarded: bool = False,
    images: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[list[Trajectory], dict[str, str]]:
    """Trajectories in the order of `rollouts`, and the id and reason of each rollout that was left out.

    Only calls and rewards of a rollout's latest attempt count (the one that succeeded); `calls` come in the order
    they finished. Posted rewards count until the rollout finished, and what it was rescored with never does: a later
    one would make a step that is executed again another step. With `keep_unrewarded` a rollout that succeeded without
    a final reward is kept, with NaN. A call is trained where the policy sampled it and it was delivered whole: one that
    an external model answered (policy '') is context at most, and so are an undelivered one, a judge's, and one that was
    decoded under a grammar in a run that learns nothing from those. Costs O(calls):
    a transition refers to its parent's, and nothing is copied. `images` are the files of the calls' images by hash: what
    learns from tokens needs them, credit rules do not.

    A conversation of two calls, the second stored by its suffix alone:

        call a: suffix [1, 2], sampled [3]             transition a: prompt [1, 2],           sampled [3]
        call b: parent a, suffix [4], sampled [5, 6]   transition b: prompt (a, its [3]) + [4], sampled [5, 6]
    """
    calls_of, rewards_of = by_attempt(calls), by_attempt(rewards)
    repeated = {call.id: call.replayed_id for own in calls_of.values() for call in own if call.replayed_id}
    kept: list[Trajectory] = []
    left_out: dict[str, str] = {}
    for rollout in rollouts:
        latest = rollout.id, rollout.attempt
        told = [reward for reward in rewards_of[latest] if counts(reward, rollout)]
        reason, transitions = _transitions(calls_of[latest], step_rewards(told), images)
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
                    replayed={call.id: _sampled_as(call.id, repeated) for call in calls_of[latest] if call.shared},
                )
            )
    return kept, left_out


def _sampled_as(call_id: str, repeated: Mapping[str, str]) -> str:
    """The call whose completion is repeated, as far back as is known: a fork of a fork repeats what that had repeated, which
    may be left out of what is learned from."""
    while call_id in repeated:
        call_id = repeated[call_id]
    return call_id


def counts(reward: Reward, rollout: Rollout) -> bool:
    """Returns whether the rollout is learned from with this reward of its latest attempt."""
    late = reward.source == "posted" and rollout.finished_ns is not None and reward.created_ns > rollout.finished_ns
    return reward.source != "rescored" and (not late or rollout.kind == "session")


def named_rewards(rewards: Iterable[Reward], name: str) -> dict[tuple[str, int], float]:
    """The final reward of this name by rollout and attempt, rescored ones included: the last one counts."""
    return {
        (reward.rollout_id, reward.attempt): reward.value
        for reward in rewards
        if reward.name == name and reward.call_id is None and reward.source != "air"
    }


def step_rewards(rewards: Iterable[Reward]) -> dict[str, dict[str, float]]:
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


def _transitions(
    attempt: list[Call], step_rewards: dict[str, dict[str, float]], images: Mapping[str, bytes]
) -> tuple[str | None, list[Transition]]:
    """Returns the reason why these calls cannot be trained (None where they can), and their transitions."""
    by_id = {call.id: call for call in attempt}
    tree: dict[str, Transition] = {}
    lengths: dict[str, int] = {}
    transitions = []
    for call in attempt:
        missing = _add(call, by_id, step_rewards, images, tree, lengths)
        if missing is not None:
            return f"call {call.id} continues call {missing}, which is not recorded", []
        if not call.policy or not call.learnable or call.agent == JUDGE or call.decoding.get("untrained"):
            continue
        length = lengths[call.id]
        if not call.sampled_ids or not length:  # without a prompt, the first token has no condition
            continue
        if length != call.prompt_tokens or len(call.logprobs) != len(call.sampled_ids):
            return (
                f"call {call.id} is recorded with {call.prompt_tokens} prompt tokens and {len(call.logprobs)} logprobs, "
                f"but its parts have {length} prompt tokens and {len(call.sampled_ids)} sampled ones"
            ), []
        transitions.append(tree[call.id])
    return (None if transitions else "the policy answered none of its calls"), transitions


def _add(
    call: Call,
    by_id: dict[str, Call],
    step_rewards: dict[str, dict[str, float]],
    images: Mapping[str, bytes],
    tree: dict[str, Transition],
    lengths: dict[str, int],
) -> str | None:
    """Puts `call` and its ancestors into `tree`, with the lengths of their prompts; returns the id of a missing parent."""
    chain = [call]
    while (parent_id := chain[-1].parent_id) is not None and parent_id not in tree:
        if parent_id not in by_id:
            return parent_id
        chain.append(by_id[parent_id])
    for one in reversed(chain):
        parent = None if one.parent_id is None else tree[one.parent_id]
        before = 0 if parent is None else lengths[parent.call_id] + len(parent.sampled_ids)
        lengths[one.id] = before + len(one.suffix_ids)
        rewards = step_rewards.get(one.id, {})
        tree[one.id] = Transition(
            call_id=one.id,
            suffix_ids=one.suffix_ids,
            sampled_ids=one.sampled_ids,
            logprobs=one.logprobs,
            versions=one.versions,
            # greedy calls are recorded with the logprobs of temperature 1
            temperature=one.sampling.temperature or 1.0,
            policy=one.policy,
            agent=one.agent,
            model=one.model,
            decoding=one.decoding,
            truncated=one.finish_reason == "length",
            reward=sum(rewards.values()),
            rewards=rewards,
            messages=one.messages,
            completion=one.completion,
            images=[
                ImageInput(hash=each.hash, start=each.start, end=each.end, data=images.get(each.hash, b""))
                for each in one.images
            ],
            parent=parent,
        )
    return None
