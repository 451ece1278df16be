"""GEPA: reflective mutation and merge over a Pareto front, by the authors' own package behind its adapter interface.

Agrawal et al. 2025, arXiv 2507.19457. The package's engine is synchronous and runs in a thread; rollouts and requests run in
the event loop. Its cache of evaluations stays off: it names an evaluation by the task's position alone, so that rewards of
training tasks would count as those of validation tasks (its pull request 425, in no release yet). What was run before costs
nothing all the same, since the search's record has it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from zlib import crc32

from agentlightning.algorithms.prompts.raced_search import RacedSearch, SearchState
from agentlightning.algorithms.prompts.reflection import reflection_prompt, rollouts_text
from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, Split
from agentlightning.errors import MissingExtraError

T = TypeVar("T")
OFFSET = 1024.0
"""Added to rewards that the package sees: it draws common ancestors by their mean reward, and fails where all of those
are 0, or one is negative."""
MIN_SHIFTED = 2.0**-10
"""Stands for every reward that is below 0 even so."""


@dataclass(frozen=True, kw_only=True)
class GEPA(RacedSearch):
    """Reflective evolution: parents from the Pareto front over validation tasks, one template changed at a time."""

    name: ClassVar[str] = "gepa"

    merge: bool = True
    """Also make candidates from two that improved different templates."""
    max_merges: int = 5
    """Merges that are accepted at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("gepa") is None:
            raise MissingExtraError("gepa", "prompts")

    async def improve(self, state: SearchState) -> str:
        import gepa

        bridge = _Bridge(state)
        adapter = _Adapter(state, bridge)

        def optimize() -> None:
            gepa.optimize(
                seed_candidate={_Component(name): text for name, text in state.run.seed.texts.items()},
                trainset=[("train", task) for task in range(state.run.sizes["train"])],
                valset=[("val", task) for task in range(state.run.sizes["val"])],
                adapter=adapter,
                reflection_minibatch_size=min(self.minibatch, state.run.sizes["train"]),
                skip_perfect_score=True,
                perfect_score=_shifted(self.perfect_reward),
                use_merge=self.merge and len(state.run.seed.texts) > 1,
                max_merge_invocations=self.max_merges,
                merge_val_overlap_floor=1,
                acceptance_criterion=adapter,
                stop_callbacks=adapter.stops,
                callbacks=[adapter],
                logger=adapter,
                track_best_outputs=False,
                cache_evaluation=False,
                seed=state.random.getrandbits(32),
            )

        try:
            await asyncio.to_thread(optimize)
        finally:
            bridge.close()
        bridge.raise_failure()
        return adapter.reason


class _Bridge:
    """Runs coroutines of the event loop for the package's thread, and keeps the first failure of one.

    The package swallows exceptions in places, so that each call after a failure fails, too, and the search ends.
    """

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._running: Future[Any] | None = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """From the package's thread: the coroutine's result."""
        with self._lock:
            if self._closed or self.failure is not None:
                work.close()
                raise self.failure or RuntimeError("the search has ended")
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running = future
        with self.kept():
            return future.result()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is raised inside as the failure of the search."""
        try:
            yield
        except BaseException as failure:
            self.failure = self.failure or failure
            raise

    def close(self) -> None:
        """From the event loop: a thread that still runs ends at its next call."""
        with self._lock:
            self._closed = True
        if self._running is not None:
            self._running.cancel()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class _Component(str):
    """The name of a template, whose place in a set is the same in every process: merge walks through a set of them, and
    a search that is run again must make the same choices."""

    __slots__ = ()

    def __hash__(self) -> int:
        return crc32(self.encode())


Item = tuple[Split, int]
"""A task: its split and its position there."""


class _Adapter:
    """Is the package's adapter, acceptance criterion, callback and logger."""

    def __init__(self, state: SearchState, bridge: _Bridge) -> None:
        self.state = state
        self.bridge = bridge
        self.reason = ""
        self._by_texts = {_key(state.run.seed.texts): state.run.seed}
        self._by_index = {0: state.run.seed}
        self._parents: list[PromptCandidate] = []
        self._merged: list[tuple[PromptCandidate, PromptCandidate]] = []
        self._idle = 0

    def log(self, message: str) -> None:
        """Log nothing: what a person wants to know is in the notes."""

    def stops(self, _: Any) -> bool:
        """True where the search is over: asked before every iteration. Merges race here, since callbacks must not fail."""
        self._idle += 1
        if self.bridge.failure is not None:
            return True
        if self._merged:
            pairs, self._merged, self._idle = self._merged, [], 0
            self.bridge.call(self.state.race(pairs))
        reason = self.state.end()
        if reason is None and self._idle > (most := self.state.settings.patience):
            reason = f"{most} minibatches in a row gave no new candidate (patience)."
        self.reason = reason or ""
        return reason is not None

    def evaluate(self, batch: list[Item], candidate: Mapping[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch

        found = self._by_texts.get(_key(candidate))
        if found is None:  # a merge: nobody asked for its texts yet
            work = self.state.propose(_plain(candidate), self._parents, "gepa merge")
            found = self.bridge.call(work)
        if found is None:
            nothing = [float("-inf")] * len(batch)
            return EvaluationBatch(outputs=[None] * len(batch), scores=nothing, trajectories=None)
        self._by_texts[_key(candidate)] = found
        [split] = {split for split, _ in batch}
        # The package fills up the last minibatch of an epoch with tasks that it has already.
        tasks = list(dict.fromkeys(task for _, task in batch))
        scores = {score.task: score for score in self.bridge.call(self.state.score(found, split, tasks))}
        rollouts = [scores[task] for _, task in batch]
        rewards = [_shifted(one.reward) for one in rollouts]
        return EvaluationBatch(outputs=rollouts, scores=rewards, trajectories=rollouts if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        with self.bridge.kept():
            scores: list[RolloutScore] = list(dict.fromkeys(eval_batch.trajectories))
            traces = self.bridge.call(self.state.run.traces(scores))
            return {name: [{"rollouts": rollouts_text(traces)}] for name in components_to_update}

    def propose_new_texts(
        self,
        candidate: Mapping[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """The new text of the one component that is asked for; none where the answer has none that can be used."""
        [component] = components_to_update
        [shown] = reflective_dataset[component]
        with self.bridge.kept():
            name, parent = str(component), self._by_texts[_key(candidate)]
            prompt = reflection_prompt(name, parent.texts[name], shown["rollouts"], self.state.tried(parent, name))
            child = self.bridge.call(self.state.edited(parent, name, prompt, "gepa reflection"))
            if child is None:
                return {}
            self._idle = 0
            self._by_texts[_key(child.texts)] = child
            return {component: child.texts[name]}

    def should_accept(self, proposal: Any, state: Any) -> bool:
        """True for a child that earned no less on the minibatch and then won its race on validation tasks."""
        before, after = (
            sum(score.reward for score in part.outputs) for part in (proposal.eval_before, proposal.eval_after)
        )
        if after < before:
            return False
        parent, child = self._by_index[proposal.parent_program_ids[0]], self._by_texts[_key(proposal.candidate)]
        [race] = self.bridge.call(self.state.race([(parent, child)]))
        return bool(race.accepted)

    def on_evaluation_start(self, event: Mapping[str, Any]) -> None:
        """Keep the parents of a merge, whose texts are evaluated next."""
        self._parents = [self._by_index[parent] for parent in event["parent_ids"]]

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Learn the package's number of a candidate; one that was merged will race against the better of its
        parents."""
        child = self._by_texts[_key(event["candidate"])]
        self._by_index[event["candidate_idx"]] = child
        if len(event["parent_ids"]) > 1:
            means = self.state.pool.means()
            parents = [self._by_index[parent] for parent in event["parent_ids"]]
            self._merged.append((max(parents, key=lambda one: means[one.number]), child))


def _shifted(reward: float) -> float:
    return max(reward + OFFSET, MIN_SHIFTED)


def _plain(texts: Mapping[str, str]) -> dict[str, str]:
    return {str(name): text for name, text in texts.items()}


def _key(texts: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(_plain(texts).items()))
