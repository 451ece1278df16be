"""APO: a critique of the text as its gradient, an edit against it as the step, and a beam of the best texts.

Pryzant et al. 2023, Automatic Prompt Optimization with "Gradient Descent" and Beam Search, arXiv 2305.03495, as Agent
Lightning 0.3 had it. Its bandit that chooses among candidates is a race here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from agentlightning.algorithms.prompts.raced_search import RacedSearch, SearchState
from agentlightning.algorithms.prompts.reflection import critique_prompt, edit_prompt, rollouts_text
from agentlightning.algorithms.prompts.search import PromptCandidate


@dataclass(frozen=True, kw_only=True)
class APO(RacedSearch):
    """Textual gradients and a beam."""

    name: ClassVar[str] = "apo"

    beam_width: Annotated[int, Field(ge=1)] = 2
    """Candidates that are kept from round to round."""
    branch_factor: Annotated[int, Field(ge=1)] = 2
    """New texts of each of them in a round."""

    async def improve(self, state: SearchState) -> str:
        beam = [state.run.seed]
        while (reason := state.end()) is None:
            pairs = []
            for parent in beam:
                for _ in range(self.branch_factor):
                    if state.end() is None and (child := await self._child(state, parent)) is not None:
                        pairs.append((parent, child))
            races = await state.race(pairs)
            beam += [race.child for race in races if race.accepted]
            means = state.pool.means()
            beam = sorted(beam, key=lambda one: (-means[one.number], one.number))[: self.beam_width]
        return reason

    async def _child(self, state: SearchState, parent: PromptCandidate) -> PromptCandidate | None:
        names = sorted(parent.texts)
        name = names[state.asked % len(names)]
        scores = await state.score(parent, "train", state.minibatch())
        if state.teaches_nothing(scores):
            state.failed += 1
            return None
        rollouts = rollouts_text(await state.run.traces(scores))
        critique = await state.run.ask(critique_prompt(name, parent.texts[name], rollouts), "apo gradient", state.asked)
        prompt = edit_prompt(name, parent.texts[name], critique, state.tried(parent, name))
        return await state.ask_for_text(parent, name, prompt, "apo edit")
