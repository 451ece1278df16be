"""The critic of the local engine: what it says, what it learns, and what its gradient does to the policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_gradients import gradients

from agentlightning.engines.local.learner import Learner
from agentlightning.engines.losses import value_loss
from agentlightning.errors import EngineError, ModelError
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, TrainingSequence
from build import learner_setup

VALUE = Loss(name="reinforce", value=0.0)
TOKENS = [3, 4, 5, 6, 20, 21, 1, 7, 8, 22, 23, 24, 1, 9, 25, 1]
CALLS = [(4, 7), (9, 13), (14, 16)]

# compute_value_loss of verl 0.9.1 with cliprange_value 0.25, times the four tokens
V, R, OLD = [1.0, 0.9, -0.4, 0.9], [0.0, 1.0, -0.1, 2.0], [0.2, 0.2, 0.3, 0.85]
VERL = (1.3012499809, [1.0, 0.0, -0.3, -1.1])


def row(**changes: Any) -> TrainingSequence:
    """Three calls; the returns of their tokens go up from 0.1."""
    returns = [0.1 * place for place in range(len(TOKENS))]
    return sequence(TOKENS, CALLS, **{"returns": returns, **changes})


def learner(model: Path, **options: Any) -> Learner:
    return Learner(model, learner_setup(**{"critic": 1.0, **options}))


def taught(model: Path, updates: int = 5, **options: Any) -> Learner:
    """A learner whose critic has learned something, so that its gradient is not 0."""
    found = learner(model, critic=1e6, **options)
    for _ in range(updates):
        found.forward_backward([row()], VALUE)
        found.optim_step(1e-8, 1.0)  # the policy as good as stays
    return found


def test_a_new_critic_says_0_of_every_state(llama: Path) -> None:
    assert learner(llama).values([row(), sequence([3, 4], [(1, 2)])]) == [[0.0] * len(TOKENS), [0.0, 0.0]]


def test_without_a_backbone_gradient_the_policy_s_gradient_is_that_without_a_critic(llama: Path) -> None:
    alone, beside = Learner(llama), taught(llama)
    beside.model.load_state_dict(alone.model.state_dict())
    alone.forward_backward([row()], Loss(name="reinforce"))
    beside.forward_backward([row()], VALUE)
    wanted, found = gradients(alone), gradients(beside)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_with_a_backbone_gradient_it_is_that_of_one_graph_through_policy_and_critic(llama: Path, packing: Any) -> None:
    both = taught(llama, packing=packing)
    loss = replace(VALUE, value=0.3)
    both.forward_backward([row()], loss)
    found = gradients(both)
    assert both._critic is not None
    states = both.model.model(input_ids=torch.tensor([TOKENS])).last_hidden_state[0] if packing == "padded" else None
    if states is None:
        padded = Learner(llama)
        padded.model.load_state_dict(both.model.state_dict())
        plain, states = padded.model, padded.model.model(input_ids=torch.tensor([TOKENS])).last_hidden_state[0]
    else:
        plain = both.model
    sampled = [place for place, trained in enumerate(row().mask) if trained]
    before = torch.tensor(sampled) - 1
    logprobs = torch.log_softmax(plain.lm_head(states[before]), -1)[range(len(sampled)), torch.tensor(TOKENS)[sampled]]
    returns = torch.tensor([0.1 * place for place in sampled])
    total = -logprobs.sum() + 0.3 * 0.5 * (both._critic.values(states[before]) - returns).square().sum()
    total.backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_merged_rows_teach_the_critic_what_a_row_a_call_does(llama: Path) -> None:
    chance = random.Random(0)
    returns = [chance.uniform(-1, 1) for _ in TOKENS]
    old = [chance.uniform(-1, 1) for _ in TOKENS]
    loss = replace(VALUE, value=0.5, value_clip=0.2)
    rows = [sequence(TOKENS[:end], [(start, end)], returns=returns[:end], values=old[:end]) for start, end in CALLS]
    found = []
    for given in ([row(returns=returns, values=old)], rows):
        critic = taught(llama)
        critic.forward_backward(given, loss)
        critic.optim_step(1e-3, 1e9)
        found.append([critic.values([row()])[0], critic.logprobs([row()])[0]])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3, abs=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3, abs=1e-4)


def test_an_estimate_is_clipped_to_what_was_said_before_the_step(llama: Path) -> None:
    critic = taught(llama)
    (values,) = critic.values([row()])
    clipped = replace(VALUE, value_clip=0.1)
    near = critic.forward_backward([row(values=values)], clipped)["value_loss"]
    far = critic.forward_backward([row(values=[-5.0] * len(TOKENS))], clipped)["value_loss"]
    assert near == pytest.approx(critic.forward_backward([row()], VALUE)["value_loss"])
    sampled = [place for place, trained in enumerate(row().mask) if trained]
    assert far == pytest.approx(sum(0.5 * (-4.9 - 0.1 * place) ** 2 for place in sampled), rel=1e-4)


def test_a_checkpoint_without_a_critic_is_refused_by_a_learner_that_has_one(llama: Path, tmp_path: Path) -> None:
    Learner(llama).save(tmp_path / "checkpoint")
    with pytest.raises(ModelError, match="belongs to another model or optimizer"):
        learner(llama).load(tmp_path / "checkpoint")


def test_the_critic_s_gradient_is_clipped_apart_from_the_policy_s(llama: Path) -> None:
    """Returns that are far off leave the policy's update as it is."""
    moved = []
    for scale in (1.0, 1e4):
        far = learner(llama, critic=1.0)
        far.forward_backward([row(returns=[scale] * len(TOKENS))], VALUE)
        norms = far.optim_step(1e-3, 0.5)
        moved.append(far.logprobs([row()])[0])
    assert norms["value_grad_norm"] > 1e3
    assert moved[0] == moved[1]


def test_a_critic_s_gradient_that_is_not_finite_is_not_applied(llama: Path) -> None:
    broken = learner(llama)
    before = broken.logprobs([row()])
    broken.forward_backward([row(returns=[float("inf")] * len(TOKENS))], VALUE)
    assert broken.optim_step(1e-3, 1.0)["skipped_updates"] == 1.0
    assert broken.logprobs([row()]) == before
    broken.forward_backward([row()], VALUE)
    broken.optim_step(1e-3, 1.0)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (VALUE, {"returns": None}, "has|have no returns"),
        (replace(VALUE, value_clip=0.1), {}, "needs sequences with the values"),
    ],
)
def test_sequences_that_lack_what_the_critic_needs_are_refused(
    llama: Path, loss: Loss, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        learner(llama).forward_backward([row(**changes)], loss)


def test_a_learner_without_a_critic_says_how_to_have_one(llama: Path) -> None:
    plain = Learner(llama)
    with pytest.raises(EngineError, match="keeps no critic"):
        plain.values([row()])
    with pytest.raises(EngineError, match="keeps no critic"):
        plain.forward_backward([row()], VALUE)


def test_a_model_whose_hidden_states_are_not_known_cannot_have_a_critic(build: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="a critic needs hidden states"):
        learner(build("GPT2"))


def test_the_value_loss_is_that_of_verl() -> None:
    values = torch.tensor(V, requires_grad=True)
    total = value_loss(values, torch.tensor(R), torch.tensor(OLD), 0.25).sum()
    (gradient,) = torch.autograd.grad(total, values)
    assert (float(total.detach()), gradient.tolist()) == (
        pytest.approx(VERL[0], abs=1e-6),
        pytest.approx(VERL[1], abs=1e-6),
    )
