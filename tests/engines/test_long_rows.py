"""Long rows: the learner's gradient is that of plain torch within a bound of memory, and the longest row is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.longest_row import growth, longest_row
from agentlightning.engines.machine import longest_row as measured
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, TrainingSequence

SMALL: dict[str, Any] = {
    "max_position_embeddings": 1 << 17,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}


def long_row(tokens: int) -> TrainingSequence:
    """A rollout of turns: 768 tokens of context, then 256 that were sampled."""
    calls = [(start + 768, start + 1024) for start in range(0, tokens, 1024)]
    return sequence([2 + (7 * place + place // 11) % 60 for place in range(tokens)], calls)


def plain_gradients(folder: Path, row: TrainingSequence) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs = torch.log_softmax(model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0, :-1], -1)
    picked = logprobs.gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
    (-picked[torch.tensor(row.mask[1:])].sum()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "bound_mb"), [(8192, 96), pytest.param(65536, 768, marks=pytest.mark.long)])
@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_a_row_of_many_micro_batches_trains_exactly_within_a_bound_of_memory(
    build: Callable[..., Path], tokens: int, bound_mb: int, packing: str
) -> None:
    folder, row = build("Llama", **SMALL), long_row(tokens)
    learner = Learner(
        folder, LearnerSetup(config=EngineConfig(device="cpu", dtype="float32", packing=packing), threads=1)
    )
    grown = growth("cpu", lambda: learner.forward_backward([row], Loss(name="sft")))
    assert grown < bound_mb << 20
    found = [parameter.grad for parameter in learner.model.parameters() if parameter.grad is not None]
    for ours, theirs in zip(found, plain_gradients(folder, row), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4 * float(theirs.abs().max()))


@pytest.mark.slow
def test_the_longest_row_grows_with_the_free_memory_up_to_the_context(build: Callable[..., Path]) -> None:
    config = EngineConfig(device="cpu", dtype="float32", max_tokens_per_microbatch=8)
    learner = Learner(build("Llama", **{**SMALL, "hidden_size": 64}), LearnerSetup(config=config, threads=1))
    found = [longest_row(learner, "cpu", 1 << 17, lambda _, most=most: most << 20) for most in (128, 256, 1 << 20)]  # type: ignore[misc]
    assert all(one is not None for one in found)
    first, second, whole = (one or 0 for one in found)
    assert 8192 < first < second < whole == 1 << 17


@pytest.mark.slow
async def test_the_longest_row_is_measured_in_a_process_of_its_own(llama: Path) -> None:
    setup = LearnerSetup(config=EngineConfig(device="cpu", dtype="float32"), threads=1)
    assert await measured(llama, setup) == 256  # its context
    assert await measured(llama, LearnerSetup(config=EngineConfig(name="verl"))) is None
