"""The control of prompt searches: the optimiser model changes the text without being told how it did.

Minibatches, races and validation are those of the other searches, so that a difference to them is what reflection is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentlightning.algorithms.prompts.raced_search import RacedSearch, SearchState
from agentlightning.algorithms.prompts.reflection import random_edit_prompt
from agentlightning.algorithms.prompts.search import ScoreRequest


@dataclass(frozen=True, kw_only=True)
class RandomSearch(RacedSearch):
    """Random edits of the best text; one that earns more on a minibatch of training tasks races against it."""

    name: ClassVar[str] = "random_search"

    async def improve(self, state: SearchState) -> str:
        best, names = state.run.seed, sorted(state.run.seed.texts)
        while (reason := state.end()) is None:
            name = names[state.asked % len(names)]
            child = await state.edited(best, name, random_edit_prompt(name, best.texts[name]), "random_search edit")
            if child is None:
                continue
            tasks = state.minibatch()
            before, after = await state.evaluate(
                [ScoreRequest(candidate=one, split="train", tasks=tasks) for one in (best, child)]
            )
            if sum(score.reward for score in after) > sum(score.reward for score in before):
                [race] = await state.race([(best, child)])
                best = child if race.accepted else best
        return reason
