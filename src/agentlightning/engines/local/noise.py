"""Drawing tokens: counter-based noise and the distribution it is applied to.

The token at position p of a completion depends on the request's seed, p and the logits alone, never on what else is in the
batch. The scheduler drives it; it knows nothing of requests or models.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK_64 = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# 53 random bits as a fraction, a hair below 1, so that u * total < total for every float64 total.
FRACTION = 2.0**-53 * (1.0 - 2.0**-52)
ROUNDING = 1e-5
"""By how much the mass of a whole vocabulary may differ from 1."""


def stream(seed: int) -> int:
    """First counter of a seed's noise: mixed once, so that the seeds 0, 1, 2, … have unrelated streams."""
    return int(_mix(np.array([seed & MASK_64], dtype=np.uint64))[0])


def uniforms(streams_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (stream, position): SplitMix64 (Steele, Lea and Flood, 2014), read at a counter."""
    bits = _mix(streams_B + (positions_B.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * FRACTION


def draw(logits_BV: Tensor, uniforms_B: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-probability under the distribution it was drawn from.

    That is softmax(logits / temperature), cut to the nucleus and renormalised where top_p < 1. Temperature 0 takes the
    largest logit and reports its plain log_softmax.
    """
    logprobs_BV, greedy_B = _distribution(logits_BV, temperatures_B, top_ps_B)
    # float64, so that the sum over a large vocabulary loses no tail.
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    targets_B = uniforms_B[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B, right=True)[:, 0]
    tokens_B = tokens_B.clamp_(max=logits_BV.shape[-1] - 1)  # reached only where the logits are not finite
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def alternatives(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` likeliest tokens of each row, and their log-probabilities under the distribution that `draw` draws from."""
    logprobs_BV, _ = _distribution(logits_BV, temperatures_B, top_ps_B)
    logprobs_BK, tokens_BK = logprobs_BV.topk(min(most, logits_BV.shape[-1]), dim=-1)
    return tokens_BK, logprobs_BK


def _distribution(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and which rows are greedy (None where none is)."""
    zero_B = temperatures_B == 0
    greedy_B = zero_B if bool(zero_B.any()) else None
    if greedy_B is not None:
        temperatures_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / temperatures_B[:, None], -1)
    nucleus_B = top_ps_B < 1 if greedy_B is None else (top_ps_B < 1) & ~greedy_B
    if bool(nucleus_B.any()):
        logprobs_BV = torch.where(nucleus_B[:, None], nucleus(logprobs_BV, top_ps_B), logprobs_BV)
    return logprobs_BV, greedy_B


def nucleus(logprobs_BV: Tensor, top_ps_B: Tensor) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p (Holtzman et al., 2020, section 3.1); of tokens that
    are equally likely the first.

    Tokens so unlikely that all of them have less than 1 - top_p are in no such set: only the others are sorted, which of a
    large vocabulary are few.
    """
    least_B = ((1 - top_ps_B - ROUNDING).clamp(min=0) / logprobs_BV.shape[-1]).log()
    likely = int((logprobs_BV >= least_B[:, None]).sum(-1).max())
    sorted_BK = logprobs_BV.topk(max(likely, 1), dim=-1).values
    mass_BK = sorted_BK.exp().cumsum(-1, dtype=torch.float64)
    inside_BK = mass_BK - sorted_BK.exp() < top_ps_B[:, None]
    sizes_B = inside_BK.sum(-1).clamp(min=1)  # whatever rounding says, the most likely token is in
    last_B1 = sorted_BK.gather(1, sizes_B[:, None] - 1)
    above_BV, equal_BV = logprobs_BV > last_B1, logprobs_BV == last_B1
    left_B = sizes_B - above_BV.sum(-1)
    inside_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1, dtype=torch.int32) <= left_B[:, None]))
    cut_BV = logprobs_BV.masked_fill(~inside_BV, float("-inf"))
    return cut_BV - cut_BV.logsumexp(-1, keepdim=True)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
