"""The learner in process: gradients, dropout, checkpoints, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_gradients import gradients
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.engines.local.learner import Learner
from agentlightning.errors import EngineError, ModelError
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, TrainingSequence
from build import learner_setup

SFT = Loss(name="sft")


def batch(n: int = 9) -> list[TrainingSequence]:
    chance = random.Random(n)
    found = []
    for _ in range(n):
        length = chance.randrange(8, 60)
        tokens = [chance.randrange(2, 64) for _ in range(length)]
        found.append(sequence(tokens, [(3, 6), (length - 2, length)], temperature=chance.choice([1.0, 0.7, 0.0])))
    return found


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("budget", [4096, 100])
def test_gradients_and_logprobs_are_those_of_a_plain_loop_over_transformers(
    build: Callable[..., Path], family: str, budget: int
) -> None:
    folder, sequences = build(family), batch()
    learner = Learner(folder, learner_setup(max_tokens_per_microbatch=budget))
    metrics = learner.forward_backward(sequences, Loss(entropy=0.05))

    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for s, logprobs in zip(sequences, learner.logprobs(sequences), strict=True):
        logits = model(input_ids=torch.tensor([s.tokens])).logits[0] / (s.temperature or 1.0)
        distributions = torch.log_softmax(logits, -1)
        assert logprobs[0] == 0.0
        for at in range(1, len(s.tokens)):
            logprob = distributions[at - 1, s.tokens[at]]
            assert float(logprob.detach()) == pytest.approx(logprobs[at], abs=1e-4)
            if s.mask[at]:
                ratio = (logprob - s.logprobs[at]).exp()
                objective = torch.minimum(ratio * s.advantages[at], ratio.clamp(0.8, 1.28) * s.advantages[at])
                p = distributions[at - 1].exp()
                total = total - s.weights[at] * (objective - 0.05 * (p * distributions[at - 1]).sum())
    total.backward()
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["tokens"] == sum(sum(s.mask) for s in sequences)
    found = gradients(learner)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_after_a_checkpoint_goes_on_bit_for_bit(llama: Path, tmp_path: Path, optimizer: Any) -> None:
    def update(learner: Learner) -> None:
        learner.forward_backward(batch(), SFT)
        learner.optim_step(3e-3, 1.0)

    learner = Learner(llama, learner_setup(optimizer=optimizer, dropout=0.1, seed=4))
    update(learner)
    learner.save(tmp_path / "checkpoint")
    update(learner)
    update(learner)

    resumed = Learner(llama, learner_setup(optimizer=optimizer, dropout=0.1, seed=5))
    update(resumed)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.updates == 1
    update(resumed)
    update(resumed)
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.updates == 3


def test_a_checkpoint_is_a_transformers_folder_with_its_tokenizer(llama: Path, tmp_path: Path) -> None:
    learner = Learner(llama)
    learner.forward_backward(batch(), SFT)
    learner.optim_step(1e-2, 1.0)
    for _ in range(2):  # the second replaces the first
        learner.save(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    for name, value in model.state_dict().items():
        assert torch.equal(value, learner.model.state_dict()[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").eos_token == "<end>"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match="cannot be written"):
        Learner(llama).save(tmp_path / "file" / "checkpoint")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_muon_moves_matrices_by_the_ratio_and_the_rest_by_adamw(llama: Path) -> None:
    learner = Learner(llama, learner_setup(optimizer={"type": "muon", "learning_rate": 5.0}))
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.forward_backward(batch(), SFT)
    learner.optim_step(1e-3, 1.0)
    for name, p in learner.model.named_parameters():
        moved = p.detach() - before[name]
        if "proj" in name:  # an orthogonal update: singular values near 1, times rate, ratio and shape
            scale = 5e-3 * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            values = torch.linalg.svdvals(moved) / scale
            assert 0.3 < float(values.median()) < 1.4
        else:
            assert float(moved.abs().max()) <= 1.01e-3


def test_dropout_acts_in_training_only_and_keeps_the_mean(llama: Path) -> None:
    sequences = batch()
    plain, noisy = Learner(llama), Learner(llama, learner_setup(dropout=0.2))
    assert noisy.logprobs(sequences) == plain.logprobs(sequences)
    losses = [noisy.forward_backward(sequences, SFT)["loss"] for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("form", ["weights", "sealed"])
def test_our_own_sampler_gets_bfloat16_where_that_is_computed_in_and_others_the_whole_weights(
    llama: Path, tmp_path: Path, form: Any
) -> None:
    Learner(llama, learner_setup(dtype="bfloat16")).export(tmp_path / "new", form)
    first, exported = (load_file(each / "model.safetensors") for each in (llama, tmp_path / "new"))
    assert exported.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(exported[name], value.to(torch.bfloat16) if form == "weights" else value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sequence([5] * 300, [(1, 2)]), "300 tokens; expected 1 to 256"),
        (sequence([5, 64], [(1, 2)]), "ids 0 to 63"),
        (sequence([5, 6], [(0, 1)]), "first token"),
    ],
)
def test_a_sequence_that_cannot_be_trained_on_is_named(llama: Path, wrong: TrainingSequence, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Learner(llama).forward_backward([wrong], SFT)


def test_saving_in_the_middle_of_an_update_is_refused(llama: Path, tmp_path: Path) -> None:
    learner = Learner(llama)
    learner.forward_backward(batch(), SFT)
    with pytest.raises(EngineError, match="between updates"):
        learner.save(tmp_path / "checkpoint")


def test_a_folder_that_no_learner_wrote_and_one_of_another_model_are_refused(
    llama: Path, build: Callable[..., Path], tmp_path: Path
) -> None:
    learner = Learner(llama)
    with pytest.raises(ModelError, match=r"no learner\.pt"):
        learner.load(llama)
    Learner(build("Llama", hidden_size=64)).save(tmp_path / "other")
    with pytest.raises(ModelError, match="another model"):
        learner.load(tmp_path / "other")


@pytest.mark.parametrize("logits_at_once", [1 << 25, 200])
def test_a_loss_of_one_s_own_trains_as_the_built_in_one_does(
    build: Callable[..., Path], tmp_path: Path, logits_at_once: int
) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text("def plain(logprobs, tokens, *, c=1.0):\n    return -c * tokens.advantages * logprobs\n")
    found = []
    for loss in (Loss(name="reinforce"), Loss(name=f"{file}:plain", settings={"c": 1.0})):
        learner = Learner(build("Llama"), learner_setup(), logits_at_once=logits_at_once)
        metrics = learner.forward_backward(batch(), loss)
        found.append((metrics["loss"], gradients(learner)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient)


def test_bfloat16_computes_close_to_float32_with_float32_weights(llama: Path) -> None:
    exact, rough = Learner(llama), Learner(llama, learner_setup(dtype="bfloat16"))
    sequences = batch()
    assert rough.forward_backward(sequences, SFT)["nll"] == pytest.approx(
        exact.forward_backward(sequences, SFT)["nll"], rel=0.05
    )
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())


def test_sequences_without_sampled_tokens_add_nothing(llama: Path) -> None:
    learner = Learner(llama)
    assert learner.forward_backward([sequence([3, 4, 5], [])], SFT) == {"loss": 0.0, "tokens": 0.0}
    assert learner.logprobs([sequence([3], [])]) == [[0.0]]
