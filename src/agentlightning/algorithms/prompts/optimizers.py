"""APO and GEPA: two ways to propose a new text from rollouts with the old one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentlightning.algorithms.prompts.racing import Pair, RacedSearch, SearchState
from agentlightning.algorithms.prompts.reflection import critique_prompt, edit_prompt, reflection_prompt, rollouts_text
from agentlightning.algorithms.prompts.search import ScoreRequest

BEAM_WIDTH = 2
"""Candidates that apo keeps from round to round."""
BRANCH_FACTOR = 2
"""New texts of each of them in a round."""


@dataclass(frozen=True, kw_only=True)
class APO(RacedSearch):
    """A critique of the text as its gradient, an edit against it as the step, and a beam of the best texts.

    Pryzant et al. 2023, Automatic Prompt Optimization with "Gradient Descent" and Beam Search, arXiv 2305.03495, as Agent
    Lightning 0.3 had it. Its bandit that chooses among candidates is a race here.
    """

    name: ClassVar[str] = "apo"

    async def propose(self, state: SearchState) -> list[Pair]:
        """The rollouts and the requests of a round run side by side."""
        parents = [parent for parent in state.beam for _ in range(BRANCH_FACTOR)]
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
        children: dict[int, Pair] = {}
        for (parent, name, _), answer in zip(jobs, await state.ask(edits, "apo edit", numbers), strict=True):
            if (child := await state.changed(parent, name, answer, "apo edit")) is not None:
                children.setdefault(child.number, (parent, child))
        return list(children.values())

    def select(self, state: SearchState) -> None:
        means = state.pool.means()
        known = [state.pool.candidates[number] for number in sorted(state.pool.accepted & means.keys())]
        state.beam = sorted(known, key=lambda one: (-means[one.number], one.number))[:BEAM_WIDTH]


@dataclass(frozen=True, kw_only=True)
class GEPA(RacedSearch):
    """Reflective evolution: parents from the Pareto front over validation tasks, one template changed at a time. Agrawal et
    al. 2025, arXiv 2507.19457, Algorithms 1 and 2. A mutation that earns less than its parent on the minibatch it was made
    from does not race."""

    name: ClassVar[str] = "gepa"

    async def propose(self, state: SearchState) -> list[Pair]:
        counts = state.pool.front_counts() or {state.run.seed.number: 1}
        [number] = state.random.choices(list(counts), list(counts.values()))
        parent, names = state.pool.candidates[number], sorted(state.run.seed.texts)
        name, tasks = names[state.asked % len(names)], state.minibatch()
        before = await state.score(parent, "train", tasks)
        if state.teaches_nothing(before):
            state.failed += 1
            return []
        rollouts = rollouts_text(await state.run.traces(before))
        prompt = reflection_prompt(name, parent.texts[name], rollouts, state.tried(parent, name))
        child = await state.edited(parent, name, prompt, "gepa reflection")
        if child is None:
            return []
        after = await state.score(child, "train", tasks)
        worse = sum(one.reward for one in after) < sum(one.reward for one in before)
        return [] if worse else [(parent, child)]
