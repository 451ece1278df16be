"""Our losses give the numbers that verl's and TRL's own code gave, which are frozen; this file freezes them again:

PYTHONPATH=src PYTHON_OF_A_VENV_WITH_THEM tests/engines/test_losses_reference.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_cases import (
    ADVANTAGES,
    ANSWERS_NOW,
    ANSWERS_REF,
    CASES,
    LENGTHS,
    MISMATCHED_NOW,
    MISMATCHED_REF,
    NOW,
    OLD,
    REF,
    SAMPLER,
    WANTED,
    tokens,
    value_and_gradient,
)

from agentlightning.engines.losses import coefficients
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence

FROZEN = Path(__file__).with_name("frozen_losses.json")

Found = dict[str, tuple[float, list[float]]]

PREFERENCES = {
    "dpo": PreferenceLoss(beta=0.3),
    "kto": PreferenceLoss(name="kto", beta=0.3, chosen_weight=1.2, rejected_weight=0.9),
}


def frozen() -> list[tuple[str, str, Any]]:
    saved = json.loads(FROZEN.read_text())
    return [(version, case, number) for version, found in saved.items() for case, number in found.items()]


def ours(case: str) -> tuple[float, list[float]]:
    if case not in PREFERENCES:
        loss, optional = CASES[case]
        return value_and_gradient(loss, tokens(optional))
    loss = PREFERENCES[case]
    rows = [
        TrainingSequence(
            rollout_id="r", tokens=[], mask=[], logprobs=[], advantages=[], weights=[], segments=[], ref_logprobs=[]
        )
    ]
    if loss.name == "dpo":
        examples = [Preference(chosen=rows, rejected=rows)] * 2
        order = [0, 2, 1, 3]
    else:
        examples = [Preference(**{"chosen" if wanted else "rejected": rows}) for wanted in WANTED]
        order = [0, 1, 2, 3]
    ratios = torch.tensor(ANSWERS_NOW) - torch.tensor(ANSWERS_REF)
    mismatched = torch.tensor(MISMATCHED_NOW) - torch.tensor(MISMATCHED_REF)
    slopes, metrics = coefficients(loss, examples, ratios[order], mismatched)
    return metrics["loss"], slopes[torch.tensor(order).argsort()].tolist()


@pytest.mark.parametrize(
    ("version", "case", "number"), frozen(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_loss_gives_the_frozen_numbers_of_its_reference(version: str, case: str, number: Any) -> None:
    total, gradient = ours(case)
    assert total == pytest.approx(number[0], rel=1e-6, abs=1e-6)
    assert gradient == pytest.approx(number[1], rel=1e-6, abs=1e-6)


def test_every_loss_has_a_frozen_reference() -> None:
    assert {case for _, case, _ in frozen()} == {*CASES, *PREFERENCES}


@pytest.mark.parametrize("library", ["verl", "trl", "vllm"])
def test_no_folder_of_the_tests_is_taken_for_a_library(library: str) -> None:
    """TRL asks for the version of what can be imported as vllm."""
    found = importlib.util.find_spec(library)
    assert found is None or found.origin is not None


def padded(values: list[float] | torch.Tensor) -> torch.Tensor:
    """A row a call."""
    parts = torch.as_tensor(values, dtype=torch.float32).split(LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def verl_losses() -> Found:
    """verl's policy losses and rollout corrections, summed over tokens."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    mask = padded([1.0] * 9)
    advantages = padded(ADVANTAGES)
    found: Found = {}
    for case, (loss, optional) in CASES.items():
        if case in ("off_policy", "cispo_free_below"):
            continue
        now = torch.tensor(NOW, requires_grad=True)
        logprobs = padded(now)
        base = padded(OLD if "old_logprobs" in optional else SAMPLER)
        gaps = (base if "old_logprobs" in optional else logprobs.detach()) - padded(SAMPLER)
        weights, kept = None, mask
        if loss.importance is not None:
            level = "sequence" if loss.importance == "call" else "token"
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(gaps, mask, level, loss.importance_cap)
        if loss.ratio_mask == "token":
            bounds = f"{loss.ratio_mask_low}_{loss.ratio_mask_high}"
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(gaps, mask, "token", bounds)
        if loss.ratio_mask == "call":
            bounds = f"{loss.ratio_mask_low}_{loss.ratio_mask_high}"
            kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(gaps, mask, "seq_mean_k1", bounds)
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=loss.clip_low,
            clip_ratio_high=loss.clip_high,
            clip_ratio_c=loss.dual_clip or 1e9,
        )
        if loss.name == "reinforce":
            total = core_algos.compute_policy_loss_reinforce(
                base, logprobs, advantages, kept, "token-sum", config, weights
            )[0]
        else:
            function = core_algos.get_policy_loss_fn({"ppo_clip": "vanilla"}.get(loss.name, loss.name))
            total = function(base, logprobs, advantages, kept, "token-sum", config, weights)[0]
        if loss.kl:
            name = {"k1": "k1+"}.get(loss.kl_estimator, loss.kl_estimator)
            total = total + loss.kl * (core_algos.kl_penalty(logprobs, padded(REF), name) * mask).sum()
        (gradient,) = torch.autograd.grad(total, now)
        found[case] = float(total.detach()), gradient.tolist()
    return found


TRL_GRPO = {
    "off_policy": {"off_policy_mask_threshold": 0.3},
    "kl_k3": {"beta": 0.1},
    "gspo": {"importance_sampling_level": "sequence"},
    "cispo_free_below": {"loss_type": "cispo", "epsilon_high": 1.28},
}


def trl_losses() -> Found:
    """The loss functions of TRL's trainers, bound to no trainer: what they read is given by hand."""
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    found: Found = {}
    for case, changes in TRL_GRPO.items():
        now = torch.tensor(NOW, requires_grad=True)
        loss: Loss = CASES[case][0]
        stub = _trainer(
            _get_per_token_logps_and_entropies=lambda *_, now=now, **__: (padded(now), padded([0.0] * 9), None),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            importance_sampling_level="token",
            loss_type="bnpo",
            epsilon_low=loss.clip_low,
            epsilon_high=loss.clip_high,
            beta=0.0,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        )
        stub.__dict__.update(changes)
        ids, mask = torch.zeros(3, 4, dtype=torch.int64), padded([1.0] * 9)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": torch.ones_like(ids),
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": padded(ADVANTAGES)[:, 0],
            "old_per_token_logps": padded(SAMPLER),
            "ref_per_token_logps": padded(REF),
            "num_items_in_batch": mask.sum(),
        }
        total = 9 * GRPOTrainer._compute_loss(stub, None, inputs)  # theirs is a mean over tokens
        (gradient,) = torch.autograd.grad(total, now)
        found[case] = float(total.detach()), gradient.tolist()
    found["dpo"] = _answers(DPOTrainer, _dpo_inputs(), 2, loss_types=["sigmoid"], loss_weights=[1.0])
    found["kto"] = _answers(KTOTrainer, _kto_inputs(), 4, loss_type="kto")
    return found


def _trainer(**fields: Any) -> SimpleNamespace:
    same = SimpleNamespace(
        device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    known = {"aux_loss_enabled": False, "accelerator": same, "model": SimpleNamespace(training=True)}
    return SimpleNamespace(**{**known, "_metrics": {"train": defaultdict(list)}, **fields})


def _answers(trainer: Any, inputs: dict[str, Any], mean_of: int, **fields: Any) -> tuple[float, list[float]]:
    """Answers of one token each, whose logprobs are the sums."""
    now = torch.tensor(ANSWERS_NOW, requires_grad=True)

    def model(**given: Any) -> SimpleNamespace:
        logps = torch.tensor(MISMATCHED_NOW) if given["input_ids"] is inputs.get("KL_input_ids") else now
        column = logps[:, None]
        flat = torch.zeros_like(column)
        return SimpleNamespace(log_probs=column, entropy=flat, mean_logits=flat, is_top1=flat.bool())

    stub = _trainer(
        beta=PREFERENCES["dpo"].beta,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        calculate_KL=True,
        desirable_weight=PREFERENCES["kto"].chosen_weight,
        undesirable_weight=PREFERENCES["kto"].rejected_weight,
        **fields,
    )
    if hasattr(trainer, "_compute_kl_logps"):
        stub._compute_kl_logps = lambda *given: trainer._compute_kl_logps(stub, *given)
    total = mean_of * trainer._compute_loss(stub, model, inputs, False)  # theirs is a mean over examples
    (gradient,) = torch.autograd.grad(total, now)
    return float(total.detach()), gradient.tolist()


def _rows() -> dict[str, torch.Tensor]:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids + 1, "completion_mask": torch.tensor([[0, 1]] * 4)}


def _dpo_inputs() -> dict[str, Any]:
    ref = torch.tensor(ANSWERS_REF)
    return {**_rows(), "ref_chosen_logps": ref[:2], "ref_rejected_logps": ref[2:]}


def _kto_inputs() -> dict[str, Any]:
    rows = _rows()
    mismatched = {f"KL_{name}": value.clone() for name, value in rows.items()}
    refs = {"ref_logps": torch.tensor(ANSWERS_REF), "ref_KL_logps": torch.tensor(MISMATCHED_REF)}
    return {**rows, **mismatched, **refs, "label": torch.tensor(WANTED)}


if __name__ == "__main__":
    found = {
        f"{library} {importlib.metadata.version(library)}": losses
        for library, losses in (("verl", verl_losses()), ("trl", trl_losses()))
    }
    lines = [
        f'"{version}": {{\n'
        + ",\n".join(f"{json.dumps(case)}: {json.dumps(number)}" for case, number in losses.items())
        + "\n}"
        for version, losses in found.items()
    ]
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
