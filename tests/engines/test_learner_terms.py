"""The learner's losses beyond the clipped ratio: whole calls, a reference, preferences; and recomputed activations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_gradients import assert_close, gradients
from transformers import AutoModelForCausalLM

from agentlightning.algorithms.offline import preference_values
from agentlightning.engines import losses as preferences
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.losses import preference_loss
from agentlightning.errors import EngineError
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence
from build import learner_setup

LOSSES = [
    Loss(name="gspo", clip_low=0.3, clip_high=0.3),
    Loss(name="cispo"),
    Loss(importance="call", importance_cap=1.5),
    Loss(ratio_mask="call", ratio_mask_low=0.7, ratio_mask_high=1.4),
    Loss(off_policy_kl=0.05, kl=0.1, entropy=0.01),
]


def conversation(learner: Learner) -> tuple[TrainingSequence, list[TrainingSequence]]:
    """Three calls near the policy, as a merged row and as a row a call."""
    tokens = [3, 4, 5, 6, 20, 21, 1, 7, 8, 22, 23, 24, 1, 9, 25, 1]
    calls = [(4, 7), (9, 13), (14, 16)]
    chance = random.Random(0)
    (now,) = learner.logprobs([sequence(tokens, calls)])
    merged = sequence(tokens, calls)
    advantages = [0.0] * 4 + [1.0] * 3 + [0.0] * 2 + [-1.0] * 4 + [0.0] + [-0.5] * 2
    lists = {
        "logprobs": [v + chance.uniform(-0.8, 0.8) for v in now],
        "old_logprobs": [v + chance.uniform(-0.3, 0.3) for v in now],
        "ref_logprobs": [v + chance.uniform(-0.5, 0.5) for v in now],
        "kl_weights": [chance.uniform(0.5, 1.0) for _ in now],
        "advantages": advantages,
    }
    rows = [sequence(tokens[:end], [(start, end)]) for start, end in calls]
    return replace(merged, **lists), [
        replace(row, **{name: values[: len(row.tokens)] for name, values in lists.items()}) for row in rows
    ]


@pytest.fixture(scope="module")
def learner(llama: Path) -> Learner:
    return Learner(llama)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.importance}-{loss.ratio_mask}-{loss.kl}")
@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_merged_rows_have_the_loss_and_the_gradient_of_a_row_a_call(llama: Path, loss: Loss, packing: Any) -> None:
    one, many = (
        Learner(llama, learner_setup(packing=packing)),
        Learner(llama, learner_setup(packing=packing), logits_at_once=64 * 2),
    )
    merged, unmerged = conversation(one)
    assert one.forward_backward([merged], loss) == pytest.approx(many.forward_backward(unmerged, loss), rel=1e-4)
    assert_close(gradients(many), gradients(one))


def test_losses_that_lack_what_they_compare_with_are_refused(learner: Learner) -> None:
    row = sequence([3, 4, 5], [(1, 3)])
    wrong = replace(row, segments=[(1, 2)])
    learner.forward_backward([wrong], Loss())
    for rows, loss, message in (
        ([wrong], Loss(name="gspo"), "rollout r is in no segment"),
        ([row], Loss(kl=0.1), "no ref_logprobs"),
        ([row, replace(row, ref_logprobs=[0.0] * 3)], Loss(kl=0.1), "has no ref_logprobs, while others have"),
    ):
        with pytest.raises(EngineError, match=message):
            learner.forward_backward(rows, loss)
    with pytest.raises(EngineError, match="reference = true"):
        learner.reference_logprobs([row])
    learner.model.zero_grad(set_to_none=True)


def answers(learner: Learner, seed: int) -> list[TrainingSequence]:
    chance = random.Random(seed)
    rows = []
    for _ in range(7):
        length = chance.randrange(5, 20)
        rows.append(sequence([chance.randrange(2, 64) for _ in range(length)], [(2, 4), (length - 1, length)]))
    return [
        replace(row, ref_logprobs=[v + chance.uniform(-0.5, 0.5) for v in now])
        for row, now in zip(rows, learner.logprobs(rows), strict=True)
    ]


@pytest.mark.parametrize("budget", [4096, 25])
@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_preference_s_gradient_is_that_of_one_graph_through_all_answers(
    llama: Path, name: Any, packing: Any, budget: int
) -> None:
    learner = Learner(llama, learner_setup(packing=packing, max_tokens_per_microbatch=budget))
    a, b, c, d, e, f, g = answers(learner, 1)
    mismatched = [[e, f], [g]]  # one of them took two rows
    loss = PreferenceLoss(name=name, beta=0.7)
    if name == "dpo":  # the first chosen answer took two rows
        examples = [Preference(chosen=[a, b], rejected=[c], weight=0.5), Preference(chosen=[d], rejected=[e])]
        mismatched = []
    else:
        examples = [Preference(chosen=[a, b], weight=0.5), Preference(rejected=[c]), Preference(chosen=[d])]
    metrics = learner.forward_backward_preferences(examples, loss, mismatched)

    model = AutoModelForCausalLM.from_pretrained(llama)

    def ratio(row: TrainingSequence) -> torch.Tensor:
        assert row.ref_logprobs is not None
        distributions = torch.log_softmax(model(input_ids=torch.tensor([row.tokens])).logits[0], -1)
        at = [i for i, sampled in enumerate(row.mask) if sampled]
        return sum((distributions[i - 1, row.tokens[i]] - row.ref_logprobs[i] for i in at), torch.zeros(()))

    found = [
        torch.stack([ratio(row) for row in side]).sum() for x in examples for side in (x.chosen, x.rejected) if side
    ]
    sums = [torch.stack([ratio(row) for row in rows]).sum() for rows in mismatched]
    beside = torch.stack(sums) if sums else torch.zeros(0)
    total, expected = preferences.preference_loss(loss, examples, torch.stack(found), beside)
    total.backward()
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["examples"] == len(examples)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert_close(gradients(learner), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("examples", "loss", "message"),
    [
        ([Preference(chosen=[sequence([3, 4], [(1, 2)])])], PreferenceLoss(), "dpo takes a chosen and a rejected"),
        ([Preference()], PreferenceLoss(name="kto"), "kto takes either a chosen or a rejected"),
        ([Preference(chosen=[sequence([3, 4], [(1, 2)])])], PreferenceLoss(name="kto"), "needs ref_logprobs"),
    ],
)
def test_examples_that_a_loss_cannot_compare_are_refused(
    learner: Learner, examples: list[Preference], loss: PreferenceLoss, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        learner.forward_backward_preferences(examples, loss)


def test_preferences_refuse_dropout_and_none_at_all_add_nothing(llama: Path, learner: Learner) -> None:
    with pytest.raises(EngineError, match="expected dropout 0"):
        Learner(llama, learner_setup(dropout=0.1)).forward_backward_preferences([], PreferenceLoss())
    assert learner.forward_backward_preferences([], PreferenceLoss()) == {"loss": 0.0, "examples": 0.0}


@pytest.mark.parametrize(("family", "packing"), [("Llama", "padded"), ("Llama", "prefix_tree"), ("GPT2", "padded")])
def test_recomputed_activations_give_the_same_gradient_and_are_recomputed(
    build: Callable[..., Path], family: str, packing: Any
) -> None:
    folder = build(family)
    plain, thrifty = (
        Learner(folder, learner_setup(packing=packing)),
        Learner(folder, learner_setup(packing=packing, gradient_checkpointing=True)),
    )
    runs = []
    attention = next(m for n, m in thrifty.model.named_modules() if n.endswith("attn"))
    attention.register_forward_hook(lambda *_: runs.append(1))
    batch = [sequence([3, 4, 5, 6], [(1, 4)]), sequence([3, 4, 7], [(2, 3)])]
    assert thrifty.logprobs(batch) == plain.logprobs(batch)
    before = len(runs)
    assert thrifty.forward_backward(batch, Loss()) == pytest.approx(plain.forward_backward(batch, Loss()))
    assert len(runs) == before + 2
    assert_close(gradients(thrifty), gradients(plain))


CHOSEN = [0.7, -1.5, 30.0]
REJECTED = [-0.2, 0.4, -60.0]
MISMATCHED = [0.5, 0.3]


def row() -> TrainingSequence:
    return sequence([1, 2], [(1, 2)], ref_logprobs=[0.0, 0.0])


def test_dpo_agrees_with_the_engines_loss() -> None:
    loss = PreferenceLoss(name="dpo", beta=0.3)
    examples = [Preference(chosen=[row()], rejected=[row()], weight=1 / 3)] * 3
    ratios_A = torch.tensor([value for pair in zip(CHOSEN, REJECTED, strict=True) for value in pair])
    _, expected = preference_loss(loss, examples, ratios_A, torch.tensor([]))
    found = preference_values(loss, CHOSEN, REJECTED)
    for name in ("loss", "margin", "accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("mismatched", [MISMATCHED, [-1.0], []])
def test_kto_agrees_with_the_engines_loss(mismatched: list[float]) -> None:
    loss = PreferenceLoss(name="kto", beta=0.3, chosen_weight=2.0, rejected_weight=1.5)
    examples = [Preference(chosen=[row()], weight=1 / 6)] * 3 + [Preference(rejected=[row()], weight=1 / 6)] * 3
    _, expected = preference_loss(loss, examples, torch.tensor(CHOSEN + REJECTED), torch.tensor(mismatched))
    found = preference_values(loss, CHOSEN, REJECTED, mismatched)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["margin"] == pytest.approx(expected["margin"], abs=1e-5)
    assert preference_values(replace(loss, rejected_weight=1.0, chosen_weight=1.0), [0.0], []) == {"loss": 0.5}
