"""Trajectories for the tests of credit rules, written in a line."""

from __future__ import annotations

from agentlightning.training_types import Trajectory, Transition
from call_tree import linked


def trajectory(
    name: str,
    reward: float,
    actions: str,
    *,
    states: str | None = None,
    agents: str | None = None,
    steps: list[float] | None = None,
) -> Trajectory:
    """One call per letter of `actions`, in the state of that letter of `states` (default: the actions before it).

    Each letter of `agents` names who made the call; `steps` are step rewards.
    """
    transitions = [
        Transition(
            call_id=f"{name}/{place}",
            suffix_ids=[0, *map(ord, actions[:place] if states is None else states[place])],
            sampled_ids=[ord(action)],
            logprobs=[-1.0],
            versions=[],
            agent=None if agents is None else agents[place],
            reward=0.0 if steps is None else steps[place],
            messages=[
                {"role": "user", "content": "task"},
                *({"role": "assistant", "content": before} for before in actions[:place]),
            ],
            completion={"role": "assistant", "content": action},
        )
        for place, action in enumerate(actions)
    ]
    return Trajectory(rollout_id=name, group_id="g", reward=reward, transitions=linked(transitions))
