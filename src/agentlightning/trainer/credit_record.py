"""Credit record: what a step made of each call, for the store's screens and as one line of the display.

The loop drives it after a step's updates. Executing a step again after a crash replaces what it wrote. Nothing reads it to
train.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean

from agentlightning.adapters.sequences import PerToken
from agentlightning.algorithms.lightning_rl import UpdatePlan
from agentlightning.algorithms.selection import CallSignal
from agentlightning.records import JSON, CallCredit
from agentlightning.store.base import LightningStore
from agentlightning.store.codec import portions
from agentlightning.trainer.progress import CreditedCall, CreditedRollout
from agentlightning.trainer.step import RowNumbers, named_rows
from agentlightning.training_types import Loss, TrainingSequence


def credit_example(plans: Iterable[UpdatePlan]) -> CreditedRollout | None:
    """Returns the rollout whose calls' advantages differ most, of several those whose advantages are largest.

    A policy's own calls of a rollout count as one. None where nothing is learned from the step. Of the advantages [1, 1],
    [2, 2] and [-1, 1] of three rollouts it is the last one, without that the second.
    """
    best: list[CallSignal] = []
    most = (0.0, 0.0)
    for plan in plans:
        by_rollout: dict[str, list[CallSignal]] = defaultdict(list)
        for signal in plan.calls:
            by_rollout[signal.rollout_id].append(signal)
        for signals in by_rollout.values():
            found = [mean_over_call(signal.advantages, signal) for signal in signals]
            size = max(found) - min(found), max(map(abs, found))
            if all(map(math.isfinite, size)) and size > most:
                best, most = signals, size
    if not best:
        return None
    return CreditedRollout(
        rollout_id=best[0].rollout_id,
        reward=best[0].reward,
        calls=[
            CreditedCall(
                text=_sampled(signal.call.completion),
                advantage=mean_over_call(signal.advantages, signal),
                agent=signal.call.agent,
            )
            for signal in best
        ],
    )


def _sampled(completion: JSON) -> str:
    """The text of a completion, its tool calls as name(arguments); without both its reasoning."""
    functions = [one.get("function", {}) for one in completion.get("tool_calls") or ()]
    tools = [f"{one.get('name', '')}({one.get('arguments', '')})" for one in functions]
    said = completion.get("content") or ("" if tools else completion.get("reasoning_content")) or ""
    return " ".join([str(said), *tools]).strip()


MAX_PORTION_BYTES = 1 << 20
"""About the size of one request: others are served between two."""
CALL_BYTES, TOKEN_BYTES = 300, 27
"""On the way to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRecorder:
    """Records one run's credit, of its latest steps."""

    store: LightningStore
    run_id: str
    keep_steps: int
    """Latest steps that are kept; 0: nothing is recorded."""

    async def record(self, step: int, plans: Mapping[str, UpdatePlan], numbers: Mapping[str, RowNumbers]) -> None:
        """By policy: the step's plans, and the ratios and entropies that the engine reported."""
        if not self.keep_steps:
            return
        found = (
            credit
            for policy, plan in plans.items()
            for credit in call_credits(plan, numbers.get(policy, {}), self.run_id, step, policy)
        )
        for portion in portions(found, _size, MAX_PORTION_BYTES):
            await self.store.record_credit(portion)
        await self.store.drop_credit(self.run_id, step + 1 - self.keep_steps)


def call_credits(plan: UpdatePlan, numbers: RowNumbers, run_id: str, step: int, policy: str) -> Iterator[CallCredit]:
    """The credit of every call of the plan; calls with a number that is not finite are left out."""
    trained = _trained(plan.minibatches, numbers)
    for signal in plan.calls:
        part = trained.get(signal.call.call_id)
        credit = CallCredit(
            run_id=run_id,
            step=step,
            rollout_id=signal.rollout_id,
            call_id=signal.call.call_id,
            policy=policy,
            credit=signal.credit,
            advantage=mean_over_call(signal.advantages, signal),
            return_=None if signal.returns is None else mean_over_call(signal.returns, signal),
            weight=0.0 if part is None else math.fsum(part.weights),
            trained_tokens=0 if part is None else sum(part.mask),
            token_advantages=_each(signal.advantages, signal),
            token_ratios=[] if part is None else part.ratios or [],
            token_entropies=[] if part is None else part.entropies or [],
            clip_share=None if part is None else clip_share(plan.loss, part),
        )
        scalars = credit.credit, credit.advantage, credit.return_ or 0.0, credit.weight
        if all(map(math.isfinite, scalars)):
            yield credit


def mean_over_call(value: PerToken, signal: CallSignal) -> float:
    """Returns the mean over the trained tokens; of a call that was forced as a whole, over all."""
    if isinstance(value, int | float):
        return float(value)
    return fmean([*compress(value, signal.call.mask)] or [*value] or [0.0])


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """One call's part of the row that an update trained; every list has one entry per sampled token."""

    mask: list[bool]
    advantages: list[float]
    weights: list[float]
    ratios: list[float] | None
    entropies: list[float] | None = None


def clip_share(loss: Loss, call: TrainedCall) -> float | None:
    """Share of the trained tokens whose gradient the loss cut; None where it cuts none, or the ratios are not known.

    The rules are those of engines/losses.py. Bounds 0.2 and 0.28, A > 0, ratios 1.3 and 0.5: the first is cut, ½.
    """
    if call.ratios is None or loss.name not in ("ppo_clip", "gspo", "cispo") or not any(call.mask):
        return None
    ratios = list(compress(call.ratios, call.mask))
    if loss.name == "gspo":  # the call's geometric mean stands for all its tokens
        logs = [math.log(ratio) if ratio > 0 else -math.inf for ratio in ratios]
        ratios = [math.exp(min(700.0, fmean(logs)))] * len(ratios)
    cut = 0
    for ratio, advantage in zip(ratios, compress(call.advantages, call.mask), strict=True):
        above, below = ratio > 1.0 + loss.clip_high, ratio < 1.0 - loss.clip_low
        dual = loss.name == "ppo_clip" and loss.dual_clip is not None and ratio > loss.dual_clip
        cut += (above or below) if loss.name == "cispo" else above if advantage >= 0 else below or dual
    return cut / len(ratios)


def _trained(minibatches: Iterable[Sequence[TrainingSequence]], numbers: RowNumbers) -> dict[str, TrainedCall]:
    """By call, from the first epoch: the others train the same rows again."""
    found: dict[str, TrainedCall] = {}
    for minibatch in minibatches:
        for name, row in named_rows(minibatch).items():
            of_row = numbers.get(name)
            for call_id, (start, end) in zip(row.calls, row.segments, strict=True):
                if call_id not in found:
                    found[call_id] = TrainedCall(
                        mask=row.mask[start:end],
                        advantages=row.advantages[start:end],
                        weights=row.weights[start:end],
                        ratios=None if of_row is None else of_row.ratios[start:end],
                        entropies=None if of_row is None else of_row.entropies[start:end],
                    )
    return found


def _each(value: PerToken, signal: CallSignal) -> list[float]:
    return [float(value)] * len(signal.call.sampled_ids) if isinstance(value, int | float) else list(value)


def _size(credit: CallCredit) -> int:
    return CALL_BYTES + TOKEN_BYTES * len(credit.token_advantages)
