"""A pretrained model with heads of 64 numbers and a vocabulary of 49,152: SmolLM2-135M-Instruct, where it was imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.testing.engine_contract import sequence
from build import learner_setup

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
MODEL = CACHE / "agentlightning" / "models" / "SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="SmolLM2-135M-Instruct is not imported; `agl models import` makes it"
    ),
]


def test_a_pretrained_model_s_logits_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(100, 40_000, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(input_ids=ids).logits
    decoder = open_decoder(MODEL)
    decoder.reserve(2, 40)
    offsets = torch.tensor([0, 0])
    for start, end in ((0, 24), (24, 39), (39, 40)):
        found = decoder.extend(0, ids[:, start:end], offsets + start, torch.tensor([end - start - 1] * 2))
        torch.testing.assert_close(found, expected[:, end - 1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_in_bfloat16_sampler_and_learner_agree_within_a_hundredth_per_token(packing: str) -> None:
    decoder = open_decoder(MODEL, torch.bfloat16)
    ids = torch.randint(100, 40_000, (1, 24), generator=torch.Generator().manual_seed(0))
    decoder.reserve(1, 64)
    logits = decoder.extend(0, ids, torch.tensor([0]), torch.tensor([23]))
    sampled, logprobs = [], []
    noise = torch.Generator().manual_seed(1)
    for at in range(24, 64):
        found = logits.log_softmax(-1)
        token = torch.multinomial(found.exp(), 1, generator=noise)
        sampled.append(int(token))
        logprobs.append(float(found[0, token[0]]))
        logits = decoder.extend(0, token, torch.tensor([at]), torch.tensor([0])) if at < 63 else logits
    learner = Learner(MODEL, learner_setup(dtype="bfloat16", packing=packing))
    [known] = learner.logprobs([sequence([*ids[0].tolist(), *sampled], [(24, 64)])])
    ratios = torch.tensor(known[24:]) - torch.tensor(logprobs)
    assert float((ratios.exp() - 1 - ratios).mean()) <= 0.01  # k3, Schulman's estimator of the divergence
