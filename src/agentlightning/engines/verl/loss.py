"""The loss that verl's workers compute: ours, from the log-probabilities that verl's model engine gives it.

Runs in every training worker, on one micro-batch. Rows carry their TrainingSequence whole, so that masks, weights and
corrections are those of any engine. Requires torch, tensordict and verl.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.utils import tensordict_utils as tu

from agentlightning.engines.corrections import needs_calls
from agentlightning.engines.losses import sampled_token_loss
from agentlightning.engines.trained_tokens import known_tokens
from agentlightning.training_types import TrainingSequence


def summed_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """verl's loss function: the SUM over the micro-batch's tokens of weight × loss, and its report.

    verl averages gradients and losses over the data-parallel ranks, so that a sum counts once for each of them.
    """
    sequences: list[TrainingSequence] = tu.get(data, "sequence")
    logprobs_T, entropies_T = model_output["log_probs"].values(), model_output["entropy"].values()
    places, start = [], 0
    for sequence in sequences:  # a token's log-probability stands at the place before it
        places += [start + at - 1 for at, trained in enumerate(sequence.mask) if trained]
        start += len(sequence.tokens)
    if not places:  # rows that fill up a batch: every rank computes a backward pass, or the others wait for ever
        return logprobs_T.sum() * 0.0, {"reports": []}
    loss = tu.get(data, "loss")
    known = known_tokens(sequences, str(logprobs_T.device), calls=needs_calls(loss))
    total, report = sampled_token_loss(loss, logprobs_T[places], entropies_T[places], known)
    return total * tu.get(data, "dp_size"), {"reports": [report.tolist()]}
