"""The control of prompt searches: the optimiser model changes the text without being told how it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentlightning.algorithms.prompts.racing import Pair, RacedSearch, SearchState
from agentlightning.algorithms.prompts.reflection import ANSWER_WITH_TEXT, CURRENT, fenced
from agentlightning.algorithms.prompts.search import ScoreRequest


@dataclass(frozen=True, kw_only=True)
class RandomSearch(RacedSearch):
    """Edits of the best text; one that earns more on a minibatch of training tasks races against it."""

    name: ClassVar[str] = "random_search"

    async def propose(self, state: SearchState) -> list[Pair]:
        best, _ = state.pool.best()
        name = sorted(best.texts)[state.asked % len(best.texts)]
        request = f"Write another version of `{name}`, with one change.\n\n{CURRENT}\n{fenced(best.texts[name])}\n\n"
        child = await state.edited(best, name, request + ANSWER_WITH_TEXT, "random_search edit")
        if child is None:
            return []
        tasks = state.minibatch()
        before, after = await state.evaluate(
            [ScoreRequest(candidate=one, split="train", tasks=tasks) for one in (best, child)]
        )
        better = sum(score.reward for score in after) > sum(score.reward for score in before)
        return [(best, child)] if better else []
