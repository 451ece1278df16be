"""One small batch, and what every advantage, loss and aggregation make of it, by loops over tokens written from the papers.

Five rollouts of two groups, of one or two calls of one to four tokens. Nothing here is imported from the package: it is what
the package is compared with, and what reference_table.md shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

GROUPS = (("a0", "a1", "a2"), ("b0", "b1"))
REWARDS = {"a0": 1.0, "a1": 0.0, "a2": 0.5, "b0": 1.0, "b1": 0.2}
LENGTHS = {"a0": (2, 3), "a1": (1,), "a2": (4, 1), "b0": (2,), "b1": (3, 2)}
"""Sampled tokens of each call."""
FIXED_LENGTH = 10
CALLS = [(name, call) for name, lengths in LENGTHS.items() for call in range(len(lengths))]
TOKENS = [(name, call, at) for name, call in CALLS for at in range(LENGTHS[name][call])]
SAMPLER = {token: -0.3 - 0.05 * place for place, token in enumerate(TOKENS)}
NOW = {token: SAMPLER[token] + 0.1 * (place * 5 % 9 - 4) for place, token in enumerate(TOKENS)}
VALUES = {token: 0.1 * (place * 3 % 7) for place, token in enumerate(TOKENS)}
"""A critic's, for gae with λ = 0.95 and no discount."""

Token = tuple[str, int, int]
PerToken = dict[Token, float]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: list[float]) -> float:
    return math.sqrt(sum((one - mean(numbers)) ** 2 for one in numbers) / (len(numbers) - 1))


def whitened(values: PerToken) -> PerToken:
    numbers = list(values.values())
    scale = math.sqrt(deviation(numbers) ** 2 + 1e-8)
    return {token: (value - mean(numbers)) / scale for token, value in values.items()}


def of_group(formula: Callable[[float, list[float]], float]) -> PerToken:
    """The formula of a rollout's reward and its group's, at each of its tokens."""
    found = {name: formula(REWARDS[name], [REWARDS[one] for one in group]) for group in GROUPS for name in group}
    return {token: found[token[0]] for token in TOKENS}


def gae() -> PerToken:
    """GAE over calls with the value of each call's last token, then over the tokens of each call."""
    found: PerToken = {}
    lam = 0.95
    for name, lengths in LENGTHS.items():
        calls = range(len(lengths))
        last = [VALUES[name, call, lengths[call] - 1] for call in calls]
        outer = [0.0] * len(lengths)
        for call in reversed(calls):
            reward = REWARDS[name] if call == len(lengths) - 1 else 0.0
            following = last[call + 1] if call + 1 < len(lengths) else 0.0
            after = outer[call + 1] if call + 1 < len(lengths) else 0.0
            outer[call] = reward + following - last[call] + lam * after
        for call in calls:
            running = 0.0
            for at in reversed(range(lengths[call])):
                final = at == lengths[call] - 1
                ahead = outer[call] + last[call] if final else VALUES[name, call, at + 1]
                running = ahead - VALUES[name, call, at] + (0.0 if final else lam * running)
                found[name, call, at] = running
    return whitened({token: found[token] for token in TOKENS})


ADVANTAGES: Mapping[str, Callable[[], PerToken]] = {
    "grpo": lambda: of_group(lambda reward, group: (reward - mean(group)) / (deviation(group) + 1e-4)),
    "dr_grpo": lambda: of_group(lambda reward, group: reward - mean(group)),
    "rloo": lambda: of_group(lambda reward, group: reward - (sum(group) - reward) / (len(group) - 1)),
    "reinforce": lambda: of_group(lambda reward, group: reward),
    "reinforce_pp": lambda: whitened(of_group(lambda reward, group: reward)),
    "reinforce_pp_baseline": lambda: whitened(of_group(lambda reward, group: reward - mean(group))),
    "maxrl": lambda: of_group(lambda reward, group: (reward - mean(group)) / mean(group)),
    "gae": gae,
}


def clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """-min(r A, clip(r) A), and its derivative after log r."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if bounded * advantage < ratio * advantage:
        return -bounded * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def token_loss(loss: str, token: Token, advantage: float) -> tuple[float, float]:
    """The loss of a token, and its derivative after the token's logprob."""
    now, ratio = NOW[token], math.exp(NOW[token] - SAMPLER[token])
    if loss == "ppo_clip":
        return clipped(ratio, advantage, 0.2, 0.28)
    if loss == "gspo":
        of_call = [one for one in TOKENS if one[:2] == token[:2]]
        return clipped(math.exp(mean([NOW[one] - SAMPLER[one] for one in of_call])), advantage, 3e-4, 4e-4)
    if loss == "cispo":
        weight = min(ratio, 1.28) * advantage
        return -weight * now, -weight
    return -advantage * now, -advantage


LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")
AGGREGATIONS: Mapping[str, Callable[[Token], float]] = {
    "token_mean": lambda token: 1 / len(TOKENS),
    "sequence_mean": lambda token: 1 / (len(CALLS) * LENGTHS[token[0]][token[1]]),
    "rollout_mean": lambda token: 1 / (len(LENGTHS) * sum(LENGTHS[token[0]])),
    "fixed_length": lambda token: 1 / (len(LENGTHS) * FIXED_LENGTH),
}


def reference(advantage: str, loss: str, aggregation: str) -> tuple[float, PerToken]:
    """The loss of the batch, and its gradient at each token's logprob."""
    advantages, total, gradient = ADVANTAGES[advantage](), 0.0, {}
    for token in TOKENS:
        value, slope = token_loss(loss, token, advantages[token])
        weight = AGGREGATIONS[aggregation](token)
        total += weight * value
        gradient[token] = weight * slope
    return total, gradient


def table() -> str:
    """The losses of the batch, as reference_table.md has them."""
    lines = [f"| advantage | loss | {' | '.join(AGGREGATIONS)} |", "| --- | --- |" + " ---: |" * len(AGGREGATIONS)]
    for advantage in ADVANTAGES:
        for loss in LOSSES:
            values = [f"{reference(advantage, loss, one)[0] + 0.0:.4f}" for one in AGGREGATIONS]
            lines.append(f"| {advantage} | {loss} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"
