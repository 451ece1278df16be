"""PromptSteps: training steps that search for prompts, one search each, with the weights of their step.

The training loop drives it. One pool of rollouts feeds both: rollouts of the step before score the prompt that the search
starts from, and the policy learns from the search's rollouts on training tasks, which are groups by task, whatever prompt
they had. All that a search asks for is in the store, so that a step that was killed finds it again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agentlightning.algorithms.prompts.search import PromptAlgorithm, RolloutScore, SearchResult, Split
from agentlightning.config.run import Config
from agentlightning.errors import BudgetSpentError
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.feedback import read_feedback
from agentlightning.store.templates import promote_candidate
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.prompts.budget import Budget
from agentlightning.trainer.prompts.candidates import CandidateBook
from agentlightning.trainer.prompts.optimizer_model import OptimizerModel
from agentlightning.trainer.prompts.settings import check_budget
from agentlightning.trainer.prompts.store_search import Key, StoreSearch, rollout_score
from agentlightning.trainer.training_loop import SearchedStep


@dataclass(kw_only=True)
class PromptSteps:
    """One part of a schedule."""

    algorithm: PromptAlgorithm
    config: Config
    """With the budget of each search, `optimize`."""
    store: LightningStore
    collector: RolloutCollector
    progress: Progress
    tasks: Mapping[Split, Sequence[JSON]]
    open_model: Callable[[], Awaitable[OptimizerModel]]
    """Makes the model that writes new texts, or finds the one that was made."""

    def __post_init__(self) -> None:
        """ConfigError where no candidate could be scored."""
        assert self.config.optimize is not None  # a part is not made without
        check_budget(self.config.optimize, self.tasks["val"])

    async def search(self, step: int) -> SearchedStep:
        """Searches from the newest prompts, and makes the best its rollouts' from now on."""
        optimize, run_id = self.config.optimize, self.collector.run_id
        assert optimize is not None
        book = CandidateBook(self.store, run_id, optimize.templates or tuple(self.config.prompts.templates), step)
        run = StoreSearch(
            config=self.config,
            store=self.store,
            collector=self.collector,
            seed=await book.open(),
            book=book,
            model=await self.open_model(),
            budget=Budget(optimize),
            tasks=self.tasks,
            logger=None,
            progress=self.progress,
            step=step,
        )
        run.know(await self._scored(step, book.versions(run.seed.number)))
        found = await searched(self.algorithm, run, self.config.trainer.seed * 1_000_003 + step)
        versions = await promote_candidate(self.store, run_id, book.versions(found.best.number))
        named = ", ".join(f"{name}@{version}" for name, version in versions.items())
        mean = "" if found.mean is None else f", validation reward {found.mean:.3f}"
        self.progress.note(f"step {step}: candidate {found.best.number}{mean}, is {named}. {found.reason}")
        ids = run.rollout_ids("train")
        known = {each.id: each for each in await self.store.rollouts(RolloutQuery(ids=ids))} if ids else {}
        metrics = run.metrics() | {"prompts/best": float(found.best.number)}
        return SearchedStep(rollouts=[known[each] for each in ids], metrics=metrics)

    async def _scored(self, step: int, versions: Mapping[str, int]) -> dict[Key, RolloutScore]:
        """Scores of the prompt that the search starts from, of rollouts that the step before learned from."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, task in enumerate(self.tasks["train"]):
            places[_key(task)].append(place)
        found: dict[Key, RolloutScore] = {}
        replicas = Counter[int]()
        for before in await self.store.steps(self.collector.run_id, after=step - 2, limit=1):
            if before.step != step - 1 or before.state != "closed" or not before.consumed:
                continue
            ids = [one.rollout_id for one in before.consumed]
            rollouts = [
                each
                for each in await self.store.rollouts(RolloutQuery(ids=ids))
                if each.state == "succeeded" and dict(each.prompts) == dict(versions)
            ]
            for rollout, words in zip(rollouts, await read_feedback(self.store, rollouts), strict=True):
                for place in places[_key(rollout.task)]:
                    found[0, "train", place, replicas[place]] = rollout_score(place, rollout, words)
                    replicas[place] += 1
        return found


async def searched(algorithm: PromptAlgorithm, run: StoreSearch, seed: int) -> SearchResult:
    """The result of a search, where its algorithm leaves a spent budget to us, too. Says which versions of somebody else are
    not the newest after it."""
    try:
        found = await algorithm.search(run, seed)
    except BudgetSpentError as spent:  # nothing better than the start is known
        found = SearchResult(best=run.seed, mean=None, reason=str(spent))
    for version in await run.book.added_meanwhile():
        line = f"agl prompts promote {run.collector.run_id} {version}"
        run.note(f"{version} was added while the search ran, and is not the newest after it; make it so with: {line}")
    return found


def _key(task: JSON) -> str:
    return json.dumps(task, sort_keys=True)
