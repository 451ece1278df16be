"""Two agents, of which one alone is told what the other's reward hangs on: only a critic that reads both can know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.critic import Critic
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.options import LearnerOptions
from agentlightning.trainer.rl.policy_update import critic_values
from agentlightning.training_types import TrainingSequence, Trajectory, Transition

pytestmark = pytest.mark.slow


def call(name: str, told: list[int], said: list[int], trained: bool) -> Transition:
    return Transition(
        call_id=name, suffix_ids=told, sampled_ids=said, logprobs=[-1.0] * len(said), versions=[], trained=trained
    )


def game(name: str, secret: int, said: int) -> Trajectory:
    """The scout sees the secret; the worker, which is trained, is asked the same in every game and earns the secret."""
    scout, worker = call(f"{name}/scout", [3, 20 + secret], [5], False), call(f"{name}/worker", [4, 6], [said], True)
    return Trajectory(rollout_id=name, group_id="g", reward=float(secret), transitions=[scout, worker])


class Critics:
    """The learner as an engine."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def values(self, rows: list[TrainingSequence], policy: str) -> list[list[float]]:
        return self._learner.values(rows)


@pytest.mark.parametrize(("view", "least", "most"), [("own", -0.5, 0.05), ("joint", 0.9, 1.0)])
async def test_a_joint_critic_explains_what_the_other_agent_was_told(
    llama: Path, view: Any, least: float, most: float
) -> None:
    learner = Learner(llama, LearnerOptions(critic_learning_rate_ratio=1e6))
    group = [game(f"{secret}{said}", secret, 7 + said) for secret in (0, 1) for said in (0, 1)]
    algorithm = LightningRL(
        group_size=4, minibatches=1, advantage="gae", critic=Critic(view=view, backbone_grad_scale=0.0)
    )
    explained = 0.0
    for step in range(30):
        values = await critic_values(cast(Any, Critics(learner)), "default", algorithm, [group])
        plan = algorithm.plan([group], seed=step, values=values)
        explained = plan.stats["explained_variance"]
        for number, rows in enumerate(plan.minibatches):
            learner.forward_backward(rows, plan.loss)
            if plan.critic_loss is not None:
                learner.forward_backward(plan.critic_minibatches[number], plan.critic_loss)
            learner.optim_step(1e-8, 1.0)
    assert least <= explained <= most
