"""Measures of a call's sampled tokens, by which a strip is coloured, and the use that training made of the call.

What a training step made of a call is in the store for the latest steps of a run; of what is not there
the legend says why. Knows no store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agentlightning.records import ABANDONED, Call, CallCredit, Rollout

LEVELS = 8
"""Shades of the token strip, in either direction."""
FULL_SHADE = 6.0
"""Nats of surprise that have the darkest shade: a probability of 0.25 %."""
FULL_ADVANTAGE = 2.0
"""Advantages of this size have the darkest shade: one scale for all calls, so that two of them can be compared."""
FULL_RATIO = 1.5
"""Ratios of this size, and of one through it, have the darkest shade: twice as far from 1 as losses usually clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUse:
    """The use that training made of a call."""

    note: str
    """The same in words: trained or context only, and why."""
    trained: bool | None
    """None where no step has consumed the rollout."""
    credit: CallCredit | None = None
    missing: str = ""
    """The reason why no credit is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number per sampled token, by which a strip is coloured."""

    name: str
    values: Sequence[float]
    """NaN where it is not known."""
    shade: Callable[[float], int]
    """From 0 (none) to LEVELS; below 0 for the colour of the other direction."""
    legend: str
    directed: bool = False
    """True where above 0 is more probable than before, and below it less."""

    def style(self, value: float) -> str:
        """The style sheet's classes of a value, none for what is not known."""
        return shade_style(self.shade(value) if math.isfinite(value) else 0, self.directed)


def shade_style(shade: int, directed: bool = True) -> str:
    """The style sheet's classes of a shade. Of what has a direction it is green with a line above, red with one below: as
    the bars of advantages, whose colours nothing else has.

    >>> shade_style(3), shade_style(-8), shade_style(2, directed=False), shade_style(0)
    ('up v3', 'down v8', 'even v2', '')
    """
    return f"{('up' if shade > 0 else 'down') if directed else 'even'} v{abs(shade)}" if shade else ""


def call_use(
    rollout: Rollout, call: Call, credit: CallCredit | None = None, missing: str = "", siblings: bool = False
) -> CallUse:
    """Returns the use that training made of a call. `siblings`: other calls of its rollout have recorded credit."""
    trained, note = _use(rollout, call, credit, siblings)
    return CallUse(note=note, trained=trained, credit=credit, missing=missing)


def _use(rollout: Rollout, call: Call, credit: CallCredit | None, siblings: bool) -> tuple[bool | None, str]:
    replayed = f"replayed from call {call.replayed_id}" if call.versions else "an answer given in place of sampling"
    for applies, why in (
        (not call.policy, "an external model sampled it"),
        (rollout.mode == "eval", "rollouts of evaluations are never trained on"),
        (not call.delivered, "the agent was gone before the end of the completion was sent"),
        (call.finish_reason == ABANDONED, "the agent went away while it was sampled"),
        (call.replayed_id is not None, replayed),
        (call.decoding.get("untrained"), "the run learns nothing from calls with these sampling fields"),
    ):
        if applies:
            return False, f"context only: {why}"
    if credit is not None and credit.trained_tokens:
        of = f"{credit.trained_tokens} of its {len(call.sampled_ids)} sampled tokens"
        return True, f"trained: step {credit.step} updated the policy by {of}"
    if credit is not None:
        none = f"its advantage was {credit.advantage:+.3g}, and no update of step {credit.step} had it"
        return False, f"context only: {none}"
    if siblings:
        none = "the step that learned from its rollout did not learn from it (see algorithm.agents and side_calls)"
        return False, f"context only: {none}"
    if rollout.outcome == "trained":
        return True, "trained: its sampled tokens are in the step's batch"
    if rollout.outcome is None:
        return None, "not consumed by a training step yet"
    return False, f"not trained: the rollout's outcome is {rollout.outcome}"


def surprise(logprob: float) -> int:
    """Returns the shade of a log-probability: the less expected the token, the darker.

    >>> surprise(0.0), surprise(-0.75), surprise(-20.0)
    (0, 1, 8)
    """
    return min(LEVELS, max(0, round(-logprob / FULL_SHADE * LEVELS)))


def away_from_zero(value: float) -> int:
    """Returns the shade of an advantage; none but 0 has no colour.

    >>> away_from_zero(0.0), away_from_zero(1e-3), away_from_zero(-1.0), away_from_zero(9.0)
    (0, 1, -4, 8)
    """
    if not value:
        return 0
    return round(math.copysign(max(1, round(min(LEVELS, abs(value) / FULL_ADVANTAGE * LEVELS))), value))


def away_from_one(ratio: float) -> int:
    """Returns the shade of a ratio, by its logarithm.

    >>> away_from_one(1.0), away_from_one(1.5), away_from_one(0.5), away_from_one(0.0)
    (0, 8, -8, -8)
    """
    if ratio <= 0:
        return -LEVELS
    return max(-LEVELS, min(LEVELS, round(math.log(ratio) / math.log(FULL_RATIO) * LEVELS)))


@dataclass(frozen=True, slots=True)
class Kept:
    """A measure of what a training step kept of each token."""

    name: str
    plural: str
    shade: Callable[[float], int]
    legend: str

    def __call__(self, call: Call, use: CallUse) -> Measure:
        values: Sequence[float] = [] if use.credit is None else getattr(use.credit, f"token_{self.plural}")
        if values:
            legend = self.legend
        elif use.credit is None:
            legend = f"no {self.plural}: {use.missing or use.note}"
        else:
            reported = "" if self.name == "advantage" else ", and the engine reports them"
            legend = f"no {self.plural}: those of the step are no longer stored{reported}"
        fits = len(values) == len(call.sampled_ids)  # whoever has a key may have stored others
        values = values if fits else [math.nan] * len(call.sampled_ids)
        return Measure(name=self.name, values=values, shade=self.shade, legend=legend, directed=True)


def by_logprob(call: Call, use: CallUse) -> Measure:
    """The log-probability of each sampled token under the distribution it was drawn from."""
    legend = f"the darker, the less probable: none at 1, darkest from {math.exp(-FULL_SHADE):.2%} down"
    return Measure(name="log-probability", values=call.logprobs, shade=surprise, legend=legend)


def by_trained(call: Call, use: CallUse) -> Measure:
    """1 for each sampled token that training learned from, 0 for those that are context only."""
    forced = {place for start, end in call.decoding.get("forced", ()) for place in range(start, end)}
    one = math.nan if use.trained is None else float(use.trained)
    values = [0.0 if place in forced and use.trained else one for place in range(len(call.sampled_ids))]
    besides = "; underlined: forced by the grammar, so context only" if forced and use.trained else ""
    return Measure(
        name="training",
        values=values,
        shade=lambda value: LEVELS // 2 if value == 1.0 else 0,
        legend=f"{use.note}{besides}",
    )


COLORINGS: Mapping[str, Callable[[Call, CallUse], Measure]] = MappingProxyType(
    {
        "logprob": by_logprob,
        "advantage": Kept(
            "advantage",
            "advantages",
            away_from_zero,
            "green, with a line above, where a token was made more probable; red, with a line below, where less; "
            f"darkest from ±{FULL_ADVANTAGE:g}",
        ),
        "ratio": Kept(
            "ratio",
            "ratios",
            away_from_one,
            "of the policy to the one that sampled, in the first update that trained the token: green, with a line above, "
            f"above 1; red, with a line below, under it; darkest from × {FULL_RATIO:g} and ÷ {FULL_RATIO:g}",
        ),
        "trained": by_trained,
    }
)
"""Measures by which a strip may be coloured, by their name in an address; the first is the default."""
