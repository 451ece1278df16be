"""LoRA: the adapter alone learns, the model without it is the reference, and plain weights come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.errors import ModelError
from agentlightning.testing.engine_contract import sequence
from agentlightning.trainer.checkpoint import export_policy
from agentlightning.training_types import Loss, TrainingSequence
from build import learner_setup

SFT = Loss(name="sft")


def row() -> TrainingSequence:
    return sequence([4, 5, 6, 40, 41, 42, 1], [(3, 7)])


def learned(folder: Path, updates: int = 3, **options: Any) -> Learner:
    learner = Learner(folder, learner_setup(lora_rank=4, **options))
    for _ in range(updates):
        update(learner)
    return learner


def update(learner: Learner) -> dict[str, float]:
    metrics = learner.forward_backward([row()], SFT)
    return metrics | learner.optim_step(3e-2, 1.0)


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([row().tokens])).logits
    return found


def test_an_adapter_starts_as_the_model_itself_and_learns(llama: Path) -> None:
    learner = Learner(llama, learner_setup(lora_rank=4))
    assert learner.logprobs([row()])[0] == pytest.approx(Learner(llama).logprobs([row()])[0], abs=1e-5)
    losses = [update(learner)["loss"] for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]


def test_only_the_adapter_s_weights_are_trained(llama: Path) -> None:
    before = Learner(llama).model.state_dict()
    learner = learned(llama)
    trained = {name for name, p in learner.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    for name, value in learner.model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(value, before[name.replace(".base_layer", "")])


def test_the_reference_is_the_model_without_its_adapter_and_costs_no_copy(llama: Path) -> None:
    learner = learned(llama, reference=True)
    first = Learner(llama).logprobs([row()])[0]
    assert learner.reference_logprobs([row()])[0] == pytest.approx(first, abs=1e-5)
    assert learner.logprobs([row()])[0] != pytest.approx(first, abs=1e-1)
    assert not any(isinstance(value, torch.nn.Module) for name, value in vars(learner).items() if name != "model")


def test_a_sampler_gets_plain_weights_that_compute_the_same(llama: Path, tmp_path: Path) -> None:
    learner = learned(llama)
    learner.export(tmp_path / "weights")
    decoder = open_decoder(tmp_path / "weights")
    decoder.reserve(1, 16)
    tokens = row().tokens
    found = decoder.extend(0, torch.tensor([tokens[:-1]]), torch.tensor([0]), torch.tensor([len(tokens) - 2]))
    assert float(torch.log_softmax(found[0], -1)[tokens[-1]]) == pytest.approx(
        learner.logprobs([row()])[0][-1], abs=1e-4
    )
    plain = set(load_file(llama / "model.safetensors"))
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == plain


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
def test_a_checkpoint_holds_a_whole_model_and_the_adapter_as_peft_reads_it(llama: Path, tmp_path: Path) -> None:
    learned(llama).save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(llama)
    with torch.inference_mode():
        adapted = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter")
        torch.testing.assert_close(
            adapted(torch.tensor([row().tokens])).logits, logits(tmp_path / "saved"), atol=1e-4, rtol=1e-4
        )


def test_resuming_with_an_adapter_is_exact(llama: Path, tmp_path: Path) -> None:
    learner = learned(llama, updates=2)
    learner.save(tmp_path / "one")
    update(learner)
    resumed = Learner(llama, learner_setup(lora_rank=4, seed=5))  # other noise, other first weights
    resumed.load(tmp_path / "one")
    update(resumed)
    assert resumed.updates == 3
    expected = learner.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def test_an_adapter_goes_with_trees_and_recomputed_layers_and_gives_the_same_update(llama: Path) -> None:
    plain = learned(llama, updates=2)
    other = learned(llama, updates=2, packing="prefix_tree", gradient_checkpointing=True)
    for (name, one), (_, two) in zip(plain.model.named_parameters(), other.model.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3, msg=name)


def test_gpt2_s_layers_can_be_adapted_too(build: Callable[..., Path], tmp_path: Path) -> None:
    folder = build("GPT2")
    learner = learned(folder)
    learner.save(tmp_path / "saved")
    assert Learner(tmp_path / "saved").logprobs([row()])[0] == pytest.approx(learner.logprobs([row()])[0], abs=1e-4)


def test_layers_that_are_not_there_and_other_kinds_of_checkpoints_are_refused(llama: Path, tmp_path: Path) -> None:
    Learner(llama).save(tmp_path / "whole")
    with pytest.raises(ModelError, match="all weights"):
        Learner(llama, learner_setup(lora_rank=4)).load(tmp_path / "whole")
    learned(llama, updates=0).save(tmp_path / "adapter")
    with pytest.raises(ModelError, match="an adapter"):
        Learner(llama).load(tmp_path / "adapter")
    with pytest.raises(ModelError, match="another model"):
        Learner(llama, learner_setup(lora_rank=2)).load(tmp_path / "adapter")


def test_a_checkpoint_with_an_adapter_is_exported_whole(llama: Path, tmp_path: Path) -> None:
    learned(llama).save(tmp_path / "saved")
    export_policy(tmp_path / "saved", tmp_path / "policy")
    assert (tmp_path / "policy" / "adapter" / "adapter_config.json").is_file()
    assert not (tmp_path / "policy" / "learner.pt").exists()
    assert torch.equal(logits(tmp_path / "policy"), logits(tmp_path / "saved"))
