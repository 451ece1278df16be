"""Agreement with verl's core_algos: frozen numbers always, the package itself where it can be imported.

The frozen numbers are those of verl 0.9.1 (torch 2.13.0, float64), computed for these very rewards, one token a response.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithms.advantage import ADVANTAGES, BATCH
from agentlightning.algorithms.critic import bilevel_gae, gae

GROUPS = [[1.0, 0.0, 0.25, 0.5], [0.3, 0.3, 0.9], [0.0, 0.0]]
VERL = {
    # compute_grpo_outcome_advantage with epsilon = 1e-4, which is TRL's and ours
    "grpo": [
        1.3171565993,
        -1.0244551328,
        -0.4390521998,
        0.1463507333,
        -0.5771836506,
        -0.5771836506,
        1.1543673012,
        0,
        0,
    ],
    # the same with norm_adv_by_std_in_grpo = False
    "dr_grpo": [0.5625, -0.4375, -0.1875, 0.0625, -0.2, -0.2, 0.4, 0.0, 0.0],
    # compute_rloo_outcome_advantage; TRL 1.16.0's RLOOTrainer subtracts the same mean of the others
    "rloo": [0.75, -0.5833333333, -0.25, 0.0833333333, -0.3, -0.3, 0.6, 0.0, 0.0],
    # compute_reinforce_plus_plus_outcome_advantage with gamma = 1
    "reinforce_pp": [
        *(1.7007665848, -0.9613028506, -0.2957854918, 0.3697318671),
        *(-0.1626820200, -0.1626820200, 1.4345596413, -0.9613028506, -0.9613028506),
    ],
    # compute_reinforce_plus_plus_baseline_outcome_advantage
    "reinforce_pp_baseline": [
        *(1.7935546932, -1.3949869836, -0.5978515644, 0.1992838548),
        *(-0.6377083354, -0.6377083354, 1.2754166707, 0.0, 0.0),
    ],
}
TOKEN_REWARDS, VALUES = [0.0, 0.0, 0.5, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.5]


def ours(rule: str, groups: list[list[float]]) -> list[float]:
    values = [row for rewards in groups for row in ADVANTAGES[rule]([[reward] for reward in rewards], rewards, True)]
    return [value for row in (BATCH[rule](values) if rule in BATCH else values) for value in row]


@pytest.mark.parametrize("rule", sorted(VERL))
def test_advantages_are_those_of_verl(rule: str) -> None:
    assert ours(rule, GROUPS) == pytest.approx(VERL[rule], abs=1e-6)


def test_returns_are_those_of_verl() -> None:
    # compute_gae_advantage_return with gamma 0.9, lam 0.8; it whitens its advantages, so its returns are compared
    _, returns = gae(TOKEN_REWARDS, VALUES, 0.9, 0.8)
    assert returns == pytest.approx([0.67373568, 0.885744, 1.1552, 0.81, 1.0], abs=1e-6)


def test_bilevel_advantages_are_those_of_ragen() -> None:
    # RAGEN's compute_bi_level_gae_advantage_return before it whitens: gamma 0.9, lam 0.8, high_level_gamma 0.95
    advantages, returns = bilevel_gae([0.5, 1.0], [VALUES[:3], VALUES[3:]], gamma=0.9, call_gamma=0.95, lam=0.8)
    assert [value for call in advantages for value in call] == pytest.approx([0.677312, 0.8296, 1.055, 0.41, 0.5])
    assert [value for call in returns for value in call] == pytest.approx([0.777312, 1.0296, 1.355, 0.81, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(VERL))
@pytest.mark.parametrize("seed", range(3))
def test_any_rewards_agree_with_verl_itself(rule: str, seed: int) -> None:
    core, torch, numpy = _verl()
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[:, None]
    mask, index = torch.ones_like(rewards), numpy.array(list("aaaaabbbbccc"))
    theirs: Any = {
        "grpo": lambda: core.compute_grpo_outcome_advantage(rewards.clone(), mask, index, epsilon=1e-4),
        "dr_grpo": lambda: core.compute_grpo_outcome_advantage(
            rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False
        ),
        "rloo": lambda: core.compute_rloo_outcome_advantage(rewards.clone(), mask, index),
        "reinforce_pp": lambda: core.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask, config=SimpleNamespace(gamma=1.0)
        ),
        "reinforce_pp_baseline": lambda: core.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), mask, index
        ),
    }[rule]()
    values = rewards[:, 0].tolist()
    assert ours(rule, [values[:5], values[5:9], values[9:]]) == pytest.approx(theirs[0][:, 0].tolist(), abs=1e-6)


@pytest.mark.slow
def test_any_values_agree_with_verl_itself() -> None:
    core, torch, _ = _verl()
    rewards, values = torch.rand(2, 1, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, theirs = core.compute_gae_advantage_return(rewards, values, torch.ones_like(rewards), 0.97, 0.9)
    _, returns = gae(rewards[0].tolist(), values[0].tolist(), 0.97, 0.9)
    assert returns == pytest.approx(theirs[0].tolist(), abs=1e-6)


def _verl() -> tuple[Any, Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    import numpy
    import torch

    return core, torch, numpy
