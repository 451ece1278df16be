"""Store records to trajectories: calls become transitions of the same tree, step rewards join their transition. The
trainer drives it with the records of finished rollouts. It knows nothing of credit, advantages or engines, and judges
nothing: a rollout that cannot be learned from is left out with the reason."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any

from agentlightning.records import JSON, Call, Reward, Rollout
from agentlightning.store.rules import final_reward
from agentlightning.store.scan import by_attempt
from agentlightning.training_types import Compaction, ImageInput, Trajectory, Transition

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
    compacted = compactions(attempt)
    tree: dict[str, Transition] = {}
    lengths: dict[str, int] = {}
    transitions = []
    for call in attempt:
        missing = _add(call, by_id, step_rewards, images, tree, lengths)
        if call.id in compacted:
            summary, replaced = (tree[name] for name in compacted[call.id])
            tree[call.id] = replace(tree[call.id], compaction=Compaction(summary=summary, replaced=replaced))
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


# --- compaction: an agent goes on from a summary that it wrote itself; its text says what a prompt came from --------------

MIN_SUMMARY_CHARS = 16
"""A shorter text may stand in a prompt by chance."""
MAX_TAGS = 16
"""Tags of a completion that are looked at: models write what they like, and each costs a look at all of it."""
NO_TEXTS = frozenset({"role", "type", "id", "tool_call_id", "name"})
"""Fields of a message that hold no words."""


def compactions(attempt: Sequence[Call]) -> dict[str, tuple[str, str]]:
    """By the first call of a conversation that goes on from a summary: the call that wrote it, and the first one of the
    conversation that it stands for. `attempt` is in the order in which calls finished.

    The summary is a completion that no call continues and that stands in the later prompt, as a whole or what it has between
    two tags. Its call continues the conversation, or was shown it as text. The later prompt keeps a message of that
    conversation's beginning (its instructions, or the task) and lacks a completion of it:

        a: [system, task]                   -> step 1     b: continues a, [result 1]   -> step 2
        c: continues b, ["Summarise"]       -> S          d: [system, task, "So far: " + S]   -> step 3

    gives {d: (c, a)}. An answer that another agent is shown is no summary: it begins with messages of its own.
    """
    continued = {call.parent_id for call in attempt}
    by_id = {call.id: call for call in attempt}
    ended: list[tuple[Call, list[str]]] = []
    found = {}
    for place, call in enumerate(attempt):
        shown = plain(call.messages) if call.parent_id is None and ended else ""
        for summary, texts in reversed(ended):
            if not any(text in shown for text in texts):
                continue
            told = _told(summary, by_id, attempt[:place])
            kept = bool(told) and any(message in call.messages for message in told[0].messages)
            if kept and not all(plain(one.completion) in shown for one in told):
                found[call.id] = summary.id, told[0].id
                break
        if call.id not in continued and (texts := summary_texts(call.completion)):
            ended.append((call, texts))
    return found


def summary_texts(completion: JSON) -> list[str]:
    """The texts by which a summary can be found in a prompt: all of its content, and what stands between two tags."""
    content = plain(completion.get("content") or "")
    names = dict.fromkeys(match[1] for match in islice(re.finditer(r"<(\w+)>", content), MAX_TAGS))
    parts = [content, *(content.partition(f"<{name}>")[2].rpartition(f"</{name}>")[0].strip() for name in names)]
    return [part for part in parts if len(part) >= MIN_SUMMARY_CHARS]


def plain(value: Any) -> str:
    """All texts of a message or of messages, white space between words as one space.

    >>> plain([{"role": "user", "content": [{"type": "text", "text": "two\\n words"}]}])
    'two words'
    """
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return " ".join(filter(None, (plain(each) for name, each in value.items() if name not in NO_TEXTS)))
    return " ".join(filter(None, map(plain, value))) if isinstance(value, list | tuple) else ""


def _told(summary: Call, by_id: Mapping[str, Call], before: Sequence[Call]) -> list[Call]:
    """The calls that a summary tells, from the first of their conversation on: those that its call continues, else those
    whose completions stand in its prompt."""
    path, parent = list[Call](), summary.parent_id
    while parent is not None and parent in by_id:
        path.append(by_id[parent])
        parent = by_id[parent].parent_id
    if path:
        return path[::-1]
    shown = plain(summary.messages)
    earlier = takewhile(lambda one: one.id != summary.id, before)
    quoted = [one for one in earlier if (text := plain(one.completion)) and text in shown]
    if not quoted:
        return []
    first = quoted[0]
    while first.parent_id is not None and first.parent_id in by_id:
        first = by_id[first.parent_id]
    return [first, *(one for one in quoted if one.id != first.id)]
