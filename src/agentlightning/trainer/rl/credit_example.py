"""Credit example: the rollout of a step that shows best which call got what, for whoever watches.

The loop drives it once a step is planned. It reads nothing but the plan: what was sampled stands in the calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from agentlightning.algorithms.lightning_rl import UpdatePlan
from agentlightning.algorithms.updates import CallSignal
from agentlightning.records import JSON
from agentlightning.trainer.progress import CreditedCall, CreditedRollout
from agentlightning.trainer.rl.credit_record import mean_over_call


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
