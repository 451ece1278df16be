"""Every advantage, loss and aggregation on one batch, beside loops written from the papers and beside verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_batch import (
    ADVANTAGES,
    AGGREGATIONS,
    CALLS,
    FIXED_LENGTH,
    GROUPS,
    LENGTHS,
    LOSSES,
    NOW,
    REWARDS,
    SAMPLER,
    TOKENS,
    VALUES,
    reference,
    table,
)

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.losses import Cispo, FixedLength
from agentlightning.engines.losses import Tokens, token_loss
from agentlightning.training_types import Trajectory, Transition
from call_tree import linked

FROZEN = json.loads(Path(__file__).with_name("frozen_table.json").read_text())
"""Of verl's core_algos at commit b178a3cd (torch 2.13.0, float64): advantages of rows that are rollouts, losses of rows that
are calls (sequence_mean) or rollouts; its seq-mean-token-sum-norm, over the number of rollouts, is fixed_length."""


def trajectory(name: str) -> Trajectory:
    calls, prompt = [], [1]
    for call, length in enumerate(LENGTHS[name]):
        of_call = [token for token in TOKENS if token[:2] == (name, call)]
        sampled = [10 + TOKENS.index(token) for token in of_call]
        calls.append(
            Transition(
                call_id=f"{name}/{call}",
                suffix_ids=prompt,
                sampled_ids=sampled,
                logprobs=[SAMPLER[token] for token in of_call],
                versions=[],
            )
        )
        assert len(sampled) == length
        prompt = [*prompt, *sampled, 2]
    return Trajectory(rollout_id=name, group_id=name[0], reward=REWARDS[name], transitions=linked(calls))


def ours(advantage: str, loss: str, aggregation: str) -> tuple[float, dict[tuple[str, int, int], float]]:
    """The loss of the batch through the plan and the engine's losses, and its gradient at each token's logprob."""
    settings: dict[str, Any] = {"advantage": advantage, "loss": loss, "aggregation": aggregation, "minibatches": 1}
    if loss == "cispo":
        settings["loss"] = Cispo(clip_high=0.28)
    if aggregation == "fixed_length":
        settings["aggregation"] = FixedLength(length=FIXED_LENGTH)
    values = {
        f"{name}/{call}": [VALUES[token] for token in TOKENS if token[:2] == (name, call)] for name, call in CALLS
    }
    groups = [[trajectory(name) for name in group] for group in GROUPS]
    plan = LightningRL(**settings).plan(groups, seed=0, values=values)
    [rows] = plan.minibatches
    ids, columns, calls = [], [], []
    for row in rows:
        for number, (start, end) in enumerate(row.segments):
            for at in range(start, end):
                ids.append(TOKENS[row.tokens[at] - 10])
                columns.append((row.logprobs[at], row.advantages[at], row.weights[at]))
                calls.append((row.rollout_id, number))
    sampler, advantages, weights = torch.tensor(columns, dtype=torch.float64).T
    numbers = torch.tensor([sorted(set(calls)).index(call) for call in calls])
    now = torch.tensor([NOW[token] for token in ids], dtype=torch.float64, requires_grad=True)
    known = Tokens(sampler, advantages, weights, calls=numbers)
    distributions = torch.stack([now, torch.log1p(-now.exp())], 1)  # a vocabulary of two words
    total, _ = token_loss(plan.loss, distributions, torch.zeros(len(ids), dtype=torch.int64), known)
    (gradient,) = torch.autograd.grad(total, now)
    found = dict.fromkeys(TOKENS, 0.0) | dict(zip(ids, gradient.tolist(), strict=True))  # no signal, no row
    return float(total.detach()), found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_batch_has_the_loss_and_the_gradient_of_the_reference(advantage: str, loss: str, aggregation: str) -> None:
    total, gradient = ours(advantage, loss, aggregation)
    expected, of_token = reference(advantage, loss, aggregation)
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert gradient == pytest.approx(of_token, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("case", FROZEN)
def test_a_batch_has_the_loss_of_verl(case: str) -> None:
    total, _ = ours(*case.split())
    assert total == pytest.approx(FROZEN[case], abs=1e-7)


def test_the_table_is_the_reference_s() -> None:
    assert table().strip() == Path(__file__).with_name("reference_table.md").read_text(encoding="utf-8").strip()
