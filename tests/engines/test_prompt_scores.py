"""Log-probabilities of prompts are those of the model, and change no completion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_scheduler import alone, assert_same, drain, requests, scheduler
from transformers import AutoModelForCausalLM

from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.scheduler import score_prompt


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_scores_are_the_models_log_softmax_also_of_prompts_read_in_pieces(
    build: Callable[..., Path], family: str
) -> None:
    folder = build(family)
    decoder = open_decoder(folder)
    decoder.reserve(1, 64)
    ids = [3 + at * 7 % 50 for at in range(40)]
    found, last = score_prompt(decoder, 0, ids, 2, "cpu", max_logits=16 * decoder.vocab)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    assert len(found) == len(ids) - 1
    assert torch.allclose(last, logits[-1:], atol=2e-4)
    for at, (own, *top) in enumerate(found):
        row = logprobs[at]
        assert own[0] == ids[at + 1]
        assert own[1] == pytest.approx(float(row[own[0]]), abs=2e-4)
        assert own[2] == int((row > row[own[0]]).sum()) + 1
        assert [(index, rank) for index, _, rank in top] == [
            (int(index), rank) for rank, index in enumerate(row.topk(2).indices, 1)
        ]


def test_a_scored_prompt_gives_the_tokens_that_it_gives_unscored(llama: Path) -> None:
    decoder = open_decoder(llama)
    crowd = requests(12)
    for request in crowd[::3]:
        request.prompt_alternatives = 1
    drain(scheduler(decoder), crowd)
    for request in crowd:
        assert_same(request, alone(decoder, request))
        assert (request.prompt_scores is None) == (request.prompt_alternatives is None)
        if request.prompt_scores is not None:
            assert [scores[0][0] for scores in request.prompt_scores] == request.prompt[1:]
