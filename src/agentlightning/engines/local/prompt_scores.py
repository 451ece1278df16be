"""Log-probabilities of a prompt's tokens, read in pieces so that the logits of a long prompt never lie in memory at once.

Driven by the scheduler for requests that ask for `prompt_logprobs`. The distribution is the model's own: temperature and
grammars belong to sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.engines.local.decoder import Decoder

MAX_LOGITS = 1 << 23
"""Logits of one piece: 32 MB in float32."""

Score = tuple[int, float, int]
"""Token id, log-probability, rank; 1 is the likeliest."""


def score_prompt(
    decoder: Decoder, row: int, ids: list[int], alternatives: int, device: str, max_logits: int = MAX_LOGITS
) -> tuple[list[list[Score]], Tensor]:
    """Read a whole prompt into a row of the cache: for every token but the first its own score, then those of the likeliest,
    and the logits after the last token, as `Decoder.extend` gives them."""
    width = max(1, min(512, max_logits // decoder.vocab))
    found: list[list[Score]] = []
    logits_MV = torch.empty(0, decoder.vocab)
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        tokens_1M = torch.tensor([part], device=device)
        take_1M = torch.arange(len(part), device=device)[None]
        logits_MV = decoder.extend(row, tokens_1M, torch.tensor([start], device=device), take_1M)[0].cpu()
        following = ids[start + 1 : start + width + 1]
        found += _scores(logits_MV[: len(following)], following, alternatives)
    return found, logits_MV[-1:]


def _scores(logits_MV: Tensor, following: list[int], alternatives: int) -> list[list[Score]]:
    if not following:
        return []
    logprobs_MV = torch.log_softmax(logits_MV.float(), -1)
    own_M = logprobs_MV.gather(1, torch.tensor(following)[:, None])
    ranks = (logprobs_MV >= own_M).sum(-1).tolist()
    top = logprobs_MV.topk(min(alternatives, logprobs_MV.shape[-1]), dim=-1)
    rows = zip(following, own_M[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        [
            (token, own, rank),
            *((other, value, at) for at, (other, value) in enumerate(zip(ids, values, strict=True), 1)),
        ]
        for token, own, rank, ids, values in rows
    ]
