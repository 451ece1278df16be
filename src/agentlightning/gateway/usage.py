"""Usage: what the calls of an attempt, of a serving key or of a run add up to, in all, on one day and in the last minute.

Driven by limits.py, which counts calls as they are recorded, and by the command line, which reads a run's. Totals only grow,
so that those of two readers are combined by the larger. Knows no protocol.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentlightning.config.limits import LIMITS_RESOURCE, LimitConfig, LimitsConfig
from agentlightning.config.run import parse_settings
from agentlightning.records import SESSION, Call, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_calls, read_rollouts

MINUTE_NS = 60 * 10**9
DAY_NS = 86_400 * 10**9

Cost = Callable[[Call, int, int], float]
"""US dollars of a call with so many tokens in its prompt and sampled."""

OF_RUN = ""
"""Name of the usage of a whole run, among those of its serving keys."""


@dataclass(slots=True, eq=False)
class Usage:
    """Totals of calls."""

    calls: int = 0
    tokens: int = 0
    spend: float = 0.0
    """US dollars."""
    day: int = 0
    """The last day with a call, in days since the epoch (UTC)."""
    day_tokens: int = 0
    day_spend: float = 0.0
    starts: deque[int] = field(default_factory=deque)
    """Times at which the calls of the last minute began, in nanoseconds since the epoch."""

    def add(self, call: Call, cost: Cost, now_ns: int) -> None:
        """Count a recorded call. Further choices of a call have sampled tokens of their own and nothing else.

        One that a fork replayed counts among the calls that an agent makes, and used nothing: no engine saw it.
        """
        first = "." not in call.id
        self.calls += first
        if call.replayed_id is not None:
            return
        if call.policy:  # of calls that are only counted the usage tells what was sampled
            prompt = call.prompt_tokens if first else 0
            sampled = len(call.sampled_ids) or _count(call.usage.get("sampled_tokens"))
        else:
            prompt, sampled = (_count(call.usage.get(name)) for name in ("prompt_tokens", "sampled_tokens"))
        self._spend(call.finished_ns // DAY_NS, prompt + sampled, cost(call, prompt, sampled))
        if first and call.started_ns > now_ns - MINUTE_NS:
            self.recent(now_ns)
            self.starts.append(call.started_ns)

    def count_prompt(self, tokens: int, now_ns: int) -> None:
        """Count a call that only read a prompt."""
        self.calls += 1
        self._spend(now_ns // DAY_NS, tokens, 0.0)
        self.starts.append(now_ns)

    def recent(self, now_ns: int) -> int:
        """The number of calls that began within the last minute."""
        while self.starts and self.starts[0] <= now_ns - MINUTE_NS:
            self.starts.popleft()
        return len(self.starts)

    def on_day(self, now_ns: int) -> tuple[int, float]:
        """Tokens and US dollars of this day."""
        return (self.day_tokens, self.day_spend) if self.day == now_ns // DAY_NS else (0, 0.0)

    def plus(self, other: Usage) -> Usage:
        """The totals of both, which have no call in common."""
        day = max(self.day, other.day)
        same = [one for one in (self, other) if one.day == day]
        return Usage(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            spend=self.spend + other.spend,
            day=day,
            day_tokens=sum(one.day_tokens for one in same),
            day_spend=sum(one.day_spend for one in same),
            starts=deque(sorted([*self.starts, *other.starts])),
        )

    def raise_to(self, other: Usage) -> None:
        """Take over the totals of `other` where they are larger: totals only grow, and each may know of calls that the
        other does not."""
        self.calls = max(self.calls, other.calls)
        self.tokens = max(self.tokens, other.tokens)
        self.spend = max(self.spend, other.spend)
        if other.day > self.day:
            self.day, self.day_tokens, self.day_spend = other.day, other.day_tokens, other.day_spend
        elif other.day == self.day:
            self.day_tokens = max(self.day_tokens, other.day_tokens)
            self.day_spend = max(self.day_spend, other.day_spend)
        if len(other.starts) > len(self.starts):
            self.starts = deque(other.starts)

    def _spend(self, day: int, tokens: int, spend: float) -> None:
        self.tokens += tokens
        self.spend += spend
        if day > self.day:
            self.day, self.day_tokens, self.day_spend = day, 0, 0.0
        if day == self.day:
            self.day_tokens += tokens
            self.day_spend += spend


class RunUsage:
    """Reads the usage of a run and of each of its serving keys, from the calls in the store; of rollouts that have all
    finished once."""

    def __init__(self) -> None:
        self._finished: dict[str, Usage] = defaultdict(Usage)
        """Of the rollouts up to `_after`, which have all finished."""
        self._after: str | None = None

    async def read(self, store: LightningStore, run_id: str, cost: Cost, now_ns: int) -> dict[str, Usage]:
        """The usage of each serving key by its token's id, and that of the run as `OF_RUN`. Raises StoreError."""
        found: dict[str, Usage] = defaultdict(Usage)
        in_order = True
        async for portion in read_rollouts(store, RolloutQuery(run_id=run_id, after=self._after)):
            begun = {rollout.id: rollout for rollout in portion if rollout.attempt}
            calls = await read_calls(store, list(begun.values()))
            in_order = in_order and all(rollout.finished_ns is not None for rollout in portion)
            counted = self._finished if in_order else found
            for call in calls:
                counted[OF_RUN].add(call, cost, now_ns)
                if (key := key_of(begun[call.rollout_id])) is not None:
                    counted[key].add(call, cost, now_ns)
            if in_order:
                self._after = portion[-1].id
        names = {OF_RUN} | found.keys() | self._finished.keys()
        return {name: self._finished[name].plus(found[name]) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """One serving key, what it has used, and what it may."""

    token: str
    name: str
    calls: int
    tokens: int
    spend: float
    """US dollars."""
    tokens_today: int
    spend_today: float
    limits: Mapping[str, float]
    """The bounds of its name that are set."""


async def read_key_usage(store: LightningStore, run_id: str, now_ns: int) -> list[KeyUsage]:
    """The usage of each serving key of a run, those that ended too, in the order in which they were made. Reads all calls of
    the run. Raises NotFoundError, ConfigError and StoreError."""
    found = await store.resources(run_id, LIMITS_RESOURCE)
    limits = parse_settings(LimitsConfig, found[0].value, "limits", ".") if found else LimitsConfig()
    usages = await RunUsage().read(store, run_id, lambda _, prompt, sampled: limits.cost(prompt, sampled), now_ns)
    told = []
    for token in await store.tokens(run_id):
        if token.role != "client":
            continue
        usage, bounds = usages.get(token.id, Usage()), limits.keys.get(token.name, LimitConfig())
        tokens_today, spend_today = usage.on_day(now_ns)
        told.append(
            KeyUsage(
                token=token.id,
                name=token.name,
                calls=usage.calls,
                tokens=usage.tokens,
                spend=usage.spend,
                tokens_today=tokens_today,
                spend_today=spend_today,
                limits={name: bound for name, bound in bounds.model_dump().items() if bound is not None},
            )
        )
    return told


def key_of(rollout: Rollout) -> str | None:
    """The id of the serving key that opened a session; None of a rollout that is none."""
    return str(rollout.task["key"]) if rollout.group_id.startswith(SESSION) and "key" in rollout.task else None


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0
