"""Counterfactual credit: how much worse the group did where one agent acted otherwise and the others acted the same.

Foerster et al. 2018, "Counterfactual Multi-Agent Policy Gradients" (COMA, arXiv 1705.08926), equation 4:

    A^a(s, u) = Q(s, u) - Σ_u' π(u' | τ^a) Q(s, (u^-a, u'))

the joint action's value less its mean over what agent a might have done with the others' actions fixed; a difference
reward (Wolpert & Tumer 2002) whose default action is the policy itself. There a critic gives Q; here the rollouts of
the group do. An agent is a name on the call, else the call's place in the conversation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentlightning.algorithms.credit.keys import Key, answer_key, places, user_key
from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.training_types import Trajectory

Joint = dict[Hashable, tuple[Hashable, ...]]
"""The actions of each agent of a rollout, in the order of its calls."""


@credit_rule("counterfactual", each="group", reads_steps=False)
def counterfactual(group: Sequence[Trajectory], *, key: str | None = None) -> list[Credit]:
    """mean R(same action of a) - mean R(any action of a), over the rollouts in which the others did what they did here.

    Where no such rollout let agent a act otherwise, the others' actions are left free: both means are over the whole
    group. If then, too, all did the same, the group shows no difference and the credit is 0; if no two did the same,
    it is R - mean R.

    Agents A and B with actions (x, y) and rewards: (1, 1) 1, (1, 2) 1, (2, 1) 0, (2, 2) 0. For A in the first
    rollout: with B's action 1 there are rewards 1 and 0, its own action earned 1: 1 - 0.5 = 0.5. For B: with A's
    action 1 both earned 1: 0.

    `key` names a function ``file.py:name`` of a transition, for actions that count as the same; default: the sampled
    tokens.
    """
    action = answer_key if key is None else user_key(key)
    joints = [_joint(trajectory, action) for trajectory in group]
    rewards = [trajectory.reward for trajectory in group]
    credits = []
    for trajectory, joint in zip(group, joints, strict=True):
        earned = {agent: _difference(agent, joint, joints, rewards) for agent in joint}
        values = [earned[agent] for agent in places(trajectory)]
        credits.append(Credit(values=values, shares=[0.0] * len(values)))
    return credits


def _difference(agent: Hashable, joint: Joint, joints: Sequence[Joint], rewards: Sequence[float]) -> float:
    others = {name: actions for name, actions in joint.items() if name != agent}
    matched = [
        index
        for index, other in enumerate(joints)
        if others == {name: actions for name, actions in other.items() if name != agent}
    ]
    for candidates in (matched, range(len(joints))):
        same = [rewards[index] for index in candidates if joints[index].get(agent) == joint[agent]]
        if len(same) < len(candidates):
            return statistics.mean(same) - statistics.mean(rewards[index] for index in candidates)
    return 0.0


def _joint(trajectory: Trajectory, action: Key) -> Joint:
    actions: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    for agent, transition in zip(places(trajectory), trajectory.transitions, strict=True):
        actions[agent].append(action(transition))
    return {agent: tuple(done) for agent, done in actions.items()}
