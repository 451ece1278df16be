"""``agl runs show RUN --drift``: how exactly the prompts of a run continued the tokens that its policy had sampled before.

Reads the rollouts page by page, so that a run of any size takes the memory of one page. It judges nothing: what each call's
prompt did, and why, was decided by the gateway when the call was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentlightning.cli.options import with_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.records import Call
    from agentlightning.store.base import LightningStore

CAUSES = {
    "assistant_message_edited": "the agent sent an answer back changed",
    "tool_result_rewritten": "the agent changed the result of a tool",
    "system_or_tools_changed": "the agent changed the system message or the tools",
    "history_cut": "the agent left out a part of the history",
    "history_edited": "the agent changed another message, or put one in between",
    "context_cleared": "the agent had old tool results or thinking cleared (context_management)",
    "template_rewrites_history": "the model's chat template writes earlier answers anew",
}


def show_drift(run: str, store: str | None) -> None:
    """Show which calls of a run do not continue the tokens sampled before, and why."""
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> Drift:
        drift = Drift()
        await find_run(opened, run)
        async for calls in pages(opened, run):
            drift.add(calls)
        return drift

    print_drift(screen(), with_store(store, work))


@dataclass(slots=True)
class Drift:
    """Counts over the calls of a run."""

    rollouts: int = 0
    continuations: Counter[str] = field(default_factory=Counter)
    """Calls of the policy by `Call.continuation`."""
    sampled: int = 0
    """Sampled tokens."""
    untrained_tokens: int = 0
    external: int = 0
    """Calls that an external model answered; nothing of them is trained."""

    def add(self, page: list[list[Call]]) -> None:
        """Count the calls of some rollouts."""
        self.rollouts += len(page)
        for call in (call for calls in page for call in calls):
            if not call.policy:
                self.external += 1
                continue
            self.continuations[call.continuation] += 1
            self.sampled += len(call.sampled_ids)
            self.untrained_tokens += call.untrained_tokens

    @property
    def calls(self) -> int:
        """Calls of the policy."""
        return self.continuations.total()

    @property
    def successors(self) -> int:
        """Those with an earlier call that they could continue."""
        return self.calls - self.continuations["first_turn"]


async def pages(store: LightningStore, run_id: str) -> AsyncIterator[list[list[Call]]]:
    """The calls of each rollout of the run (of its latest attempt), some rollouts at a time, oldest first."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import read_rollouts

    async for found in read_rollouts(store, RolloutQuery(run_id=run_id)):
        calls: dict[str, list[Call]] = {rollout.id: [] for rollout in found}
        for call in await store.calls(list(calls)):
            calls[call.rollout_id].append(call)
        yield list(calls.values())


def print_drift(console: Console, drift: Drift) -> None:
    """A line for each kind of call, and what the forks cost."""
    if not drift.calls:
        console.print(f"no calls of the policy are recorded in {drift.rollouts} rollouts")
        return
    count = drift.continuations
    forks = {cause: calls for cause, calls in count.most_common() if cause not in ("continued", "first_turn")}
    rows = [
        (f"{drift.calls:,}", f"calls of the policy, in {drift.rollouts:,} rollouts"),
        (f"{count['first_turn']:,}", "first turns: nothing came before that they could continue"),
        (f"{count['continued']:,}", "continued: the prompt begins with an earlier call's prompt and answer, id by id"),
        (
            f"{sum(forks.values()):,}",
            "forks: the prompt repeats an earlier answer, but not with the ids sampled",
        ),
    ]
    rows += [(f"{calls:,}", f"    {cause}: {CAUSES.get(cause, 'unknown cause')}") for cause, calls in forks.items()]
    lost = drift.untrained_tokens / max(1, drift.sampled)
    rows.append((f"{drift.sampled:,}", "sampled tokens"))
    rows.append(
        (f"{drift.untrained_tokens:,}", f"sampled tokens that forks repeat as context only ({lost:.2%} of all sampled)")
    )
    if drift.external:
        rows.append((f"{drift.external:,}", "calls answered by external models, not counted above"))
    width = max(len(number) for number, _ in rows)
    for number, words in rows:
        console.print(f"{number:>{width}}  {words}", soft_wrap=True)
    if drift.successors:
        share = count["continued"] / drift.successors
        console.print(
            f"exact share: {share:.2%} of the {drift.successors:,} calls that have a predecessor", style="bold"
        )
    else:
        console.print("exact share: no call has a predecessor", style="bold")
