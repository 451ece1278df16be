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
from agentlightning.algorithms.prompts.search import PromptCandidate, ScoreRequest


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
            races = await state.race(await self._children(state, beam))
            beam += [race.child for race in races if race.accepted]
            means = state.pool.means()
            beam = sorted(beam, key=lambda one: (-means[one.number], one.number))[: self.beam_width]
        return reason

    async def _children(
        self, state: SearchState, beam: list[PromptCandidate]
    ) -> list[tuple[PromptCandidate, PromptCandidate]]:
        """The new candidates of a round, each with its parent; its rollouts and its requests run side by side."""
        parents = [parent for parent in beam for _ in range(self.branch_factor)]
        found = await state.evaluate(
            [ScoreRequest(candidate=parent, split="train", tasks=state.minibatch()) for parent in parents]
        )
        taught = [pair for pair in zip(parents, found, strict=True) if not state.teaches_nothing(pair[1])]
        state.failed += len(parents) - len(taught)
        numbers, names = state.numbers(len(taught)), sorted(state.run.seed.texts)
        jobs = []
        for number, (parent, scores) in zip(numbers, taught, strict=False):  # fewer numbers near max_proposals
            name = names[number % len(names)]
            rollouts = rollouts_text(await state.run.traces(scores))
            jobs.append((parent, name, critique_prompt(name, parent.texts[name], rollouts)))
        critiques = await state.ask([prompt for *_, prompt in jobs], "apo gradient", numbers)
        edits = [
            edit_prompt(name, parent.texts[name], critique, state.tried(parent, name))
            for (parent, name, _), critique in zip(jobs, critiques, strict=True)
        ]
        children: dict[int, tuple[PromptCandidate, PromptCandidate]] = {}
        for (parent, name, _), answer in zip(jobs, await state.ask(edits, "apo edit", numbers), strict=True):
            if (child := await state.changed(parent, name, answer, "apo edit")) is not None:
                children.setdefault(child.number, (parent, child))
        return list(children.values())
