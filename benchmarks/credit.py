"""Counts the steps that each credit rule needs where one of four calls decides, and which one is known.

    python benchmarks/credit.py [--seeds 3] [--rules uniform,learned]

A task asks one of eight questions. The agent makes four calls: three of sixteen tokens, which are talk, and one of a single
token, the second, which decides whether it succeeds; later prompts show whether the choice was right. The policy is a
softmax over eight tokens, linear in random features that all states share, so that what is learned of one call disturbs
the others, as it does in a network. `LightningRL` makes the updates, Adam applies them; only the credit rule differs.
Held-out success is the exact probability of the right choice, over all questions, under the policy at temperature 1.

Last line: {"uniform_steps", "steps": {rule: n}, "best_over_uniform"}: medians over seeds of the first step at 90%, at most
200.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.settings import NamedPart
from agentlightning.training_types import TrainingSequence, Trajectory, Transition

QUESTIONS, LENGTHS, DECIDES, VOCABULARY = 8, (16, 1, 16, 16), 1, 8
CALLS, TOKENS = len(LENGTHS), max(LENGTHS)
FEATURES, GROUP, TASKS, CAP, GOAL, RATE = 64, 8, 8, 200, 0.9, 0.03
CALL, SHOWN = 100, 200
"""First token ids of what a prompt says of the call's number and of the choice."""
RULES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "step_rewards": {},
    "gigpo": {},
    "grouped_gae": {"key": f"{__file__}:state"},
    "decisive": {"key": f"{__file__}:choice"},
    "learned": {},
    "counterfactual": {"key": f"{__file__}:choice"},
}


def choice(transition: Transition) -> int:
    """Returns the choice of a call, for the counterfactual rule."""
    return transition.sampled_ids[0]


def state(transition: Transition) -> tuple[int, ...]:
    """Returns the question, the call's number and what the prompt shows."""
    return tuple(transition.suffix_ids)


class Policy:
    """logits = W φ(state), where a state is (question, call, what the prompt shows, place of the token)."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        features = draw.normal(size=(QUESTIONS, CALLS, 3, TOKENS, FEATURES))
        self.features = features / np.linalg.norm(features, axis=-1, keepdims=True)
        self.weights = np.zeros((FEATURES, VOCABULARY))
        self.answers = draw.integers(VOCABULARY, size=QUESTIONS)
        self.moments = np.zeros((2, FEATURES, VOCABULARY))
        self.updates = 0
        self._refresh()

    def success(self) -> float:
        return float(np.mean([self.odds[q, DECIDES, 0, 0, answer] for q, answer in enumerate(self.answers)]))

    def update(self, rows: list[TrainingSequence]) -> None:
        """One step of Adam along Σ weight × advantage × ∇ log π."""
        states, tokens, factors = [], [], []
        for row in rows:
            question, call, shown = row.tokens[:3]
            for place in range(3, len(row.tokens)):
                states.append((question, call - CALL, shown - SHOWN, place - 3))
                tokens.append(row.tokens[place])
                factors.append(row.weights[place] * row.advantages[place])
        where = tuple(np.array(states).T)
        gaps = np.eye(VOCABULARY)[tokens] - self.odds[where]
        gradient = self.features[where].T @ (gaps * np.array(factors)[:, None])
        self.updates += 1
        for moment, decay, value in zip(self.moments, (0.9, 0.99), (gradient, gradient**2), strict=True):
            moment *= decay
            moment += (1 - decay) * value
        first, second = self.moments[0] / (1 - 0.9**self.updates), self.moments[1] / (1 - 0.99**self.updates)
        self.weights += RATE * first / (np.sqrt(second) + 1e-8)
        self._refresh()

    def _refresh(self) -> None:
        logits = self.features @ self.weights
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        self.odds = odds / odds.sum(axis=-1, keepdims=True)


def rollout(policy: Policy, name: str, question: int, steps: bool, draw: np.random.Generator) -> Trajectory:
    """One execution; with `steps`, the reward is recorded on the call that earned it."""
    transitions: list[Transition] = []
    shown, reward = 0, 0.0
    for call in range(CALLS):
        odds = policy.odds[question, call, shown, : LENGTHS[call]]
        drawn = draw.random(len(odds))[:, None]
        sampled = np.minimum((odds.cumsum(axis=-1) < drawn).sum(axis=-1), VOCABULARY - 1).tolist()
        prompt, earned = [question, CALL + call, SHOWN + shown], 0.0
        if call == DECIDES:
            reward = earned = float(sampled[0] == policy.answers[question])
            shown = 1 + int(earned)
        transitions.append(
            Transition(
                call_id=f"{name}/{call}",
                suffix_ids=prompt,
                sampled_ids=sampled,
                logprobs=[float(np.log(row[token])) for row, token in zip(odds, sampled, strict=True)],
                versions=[],
                reward=earned if steps else 0.0,
            )
        )
    return Trajectory(
        rollout_id=name, group_id=name.split("/")[0], reward=0.0 if steps else reward, transitions=transitions
    )


def steps_to_goal(rule: str, seed: int) -> int:
    policy, draw = Policy(seed), np.random.default_rng(1000 + seed)
    credit = NamedPart(type=rule, **RULES[rule])
    algorithm = LightningRL(credit=credit, loss="reinforce", minibatches=1, group_size=GROUP)
    for step in range(1, CAP + 1):
        groups = [
            [rollout(policy, f"{task}/{replica}", question, rule == "step_rewards", draw) for replica in range(GROUP)]
            for task, question in enumerate(draw.integers(QUESTIONS, size=TASKS).tolist())
        ]
        for minibatch in algorithm.plan(groups, seed=step).minibatches:
            policy.update(minibatch)
        if policy.success() >= GOAL:
            return step
    return CAP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default=",".join(RULES))
    given = parser.parse_args()
    steps: dict[str, float] = {}
    for rule in dict.fromkeys(["uniform", *given.rules.split(",")]):
        counts = [steps_to_goal(rule, seed) for seed in range(given.seeds)]
        steps[rule] = statistics.median(counts)
        print(f"{rule:15} {steps[rule]:5.0f}  ({', '.join(map(str, counts))})", flush=True)
    uniform = steps.pop("uniform")
    best = min(steps.values(), default=uniform)
    print(json.dumps({"uniform_steps": uniform, "steps": steps, "best_over_uniform": round(best / uniform, 3)}))


if __name__ == "__main__":
    main()
