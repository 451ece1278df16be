"""Optimization: one search for prompts, its processes put together, run beside the algorithm, and its best texts promoted.

The command line drives it. The algorithm is run from its start whenever the run goes on: what it asks for again is in the
store. It loads neither torch nor a web server.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentlightning.algorithms.prompts.search import PromptAlgorithm, PromptCandidate, SearchResult, Split
from agentlightning.config.external import secret_variables
from agentlightning.config.run import Config
from agentlightning.errors import BudgetSpentError, ConfigError
from agentlightning.records import JSON
from agentlightning.runtime.code_loader import is_code, load_function
from agentlightning.store.base import LightningStore
from agentlightning.store.templates import promote_candidate
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.monitor.senders import TraceExport
from agentlightning.trainer.monitor.trackers import TrackerProcesses, check_trackers
from agentlightning.trainer.policies import publish
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.prompts.optimizer_model import open_model
from agentlightning.trainer.prompts.store_search import Budget, CandidateBook, StoreSearch
from agentlightning.trainer.run_lease import RunSession
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.trainer.schedules import prompt_algorithm
from agentlightning.trainer.serving import OPTIMIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeResult:
    """Result of a search."""

    run_id: str
    folder: Path
    seed: PromptCandidate
    """The texts that it started from."""
    best: PromptCandidate
    mean: float | None
    """Mean validation reward of the best; None where none was scored on all tasks."""
    reason: str
    """Sentence that says why it ended."""
    finished: bool
    """False where it was stopped."""
    means: dict[int, float]
    """Mean validation reward by candidate, of those that were scored on all tasks."""
    rewards: tuple[dict[int, float], dict[int, float]]
    """By validation task, rewards of the seed and of the best."""
    promoted: dict[str, int]
    """By template, the version that rollouts get from now on."""
    rollouts: int
    tokens: int


class Optimization(RunSession[OptimizeResult]):
    """One configured search, from its start to its end."""

    command = "optimize"
    begun = "what was found is kept"

    def __init__(self, config: Config, folder: RunFolder, progress: Progress, *, promote: bool = True) -> None:
        """promote: make the best texts the newest versions; else those that it started from, whatever was added since."""
        super().__init__(config, folder, progress)
        self._promote = promote
        self._search: StoreSearch | None = None

    def stop(self) -> None:
        """Ask the search to end after the batch that is under way. From any thread."""
        self._stopping = True
        if self._search is not None:
            self._search.stopping = True
        self._progress.note("ending after this batch; Ctrl-C again ends at once")

    async def _work(self, resume: bool, name: str) -> OptimizeResult:
        config, folder, trackers = self._config, self._folder, self._config.trainer.trackers
        algorithm = prompt_algorithm(config)
        assert config.optimize is not None  # the algorithm is not made without
        if is_code(config.optimize.model):  # loaded before anything starts
            load_function(config.optimize.model, ("prompt", "purpose", "number"), "optimize.model")
        tasks = load_splits(config)
        if (size := len(tasks["val"])) > config.optimize.max_rollouts:
            raise ConfigError(
                f"optimize.max_rollouts: expected at least {size}, one for each validation task, got "
                f"{config.optimize.max_rollouts}: nothing could be scored"
            )

        agent, note = config.agent, self._progress.note
        name = f"{OPTIMIZE} {Path(agent.run).name if agent.run is not None else agent.command}"
        register = partial(self._enter, resume=resume, name=name, summary={})
        processes = Processes(config, folder, register=register, progress=self._progress)
        check_trackers(trackers)
        withhold = secret_variables(config.model_dump())
        async with (
            aclosing(self._lease),
            processes,
            TrackerProcesses(folder, trackers, note, withhold) as sending,
            AsyncExitStack() as stack,
        ):
            store = processes.store
            if processes.policies:
                await publish(store, processes.engine, folder.run_id, processes.policies, step=0, parent=None)
            logger = MetricLogger(run_id=folder.run_id, folder=folder, store=store, progress=self._progress, rules={})
            logger.on_row = sending.poke
            if resume:  # the search is run again from its start, and says everything again
                await store.reopen_steps(folder.run_id, 0)
                logger.resumed(0)
            book = CandidateBook(store, folder.run_id, config.optimize.templates or tuple(config.prompts.templates))
            search = self._search = StoreSearch(
                config=config,
                store=store,
                collector=RolloutCollector(store, folder.run_id),
                seed=await book.open(),
                book=book,
                answer=await open_model(config, folder.run_id, processes, stack),
                budget=Budget(config.optimize),
                tasks=tasks,
                logger=logger,
                progress=self._progress,
                stopping=self._stopping,
            )
            await processes.start_workers(note)
            async with TraceExport(config.tracing.export, folder, store, note):
                found = await processes.beside(self._lease.during(searched(algorithm, search, config.trainer.seed)))
            result = await self._leave(store, search, found)
            sending.state = "finished" if result.finished else "interrupted"
            return result

    async def _leave(self, store: LightningStore, search: StoreSearch, found: SearchResult) -> OptimizeResult:
        finished = not search.stopped
        chosen = found.best if finished and self._promote else search.seed
        promoted = await promote_candidate(store, self._folder.run_id, search.book.versions(chosen.number))
        summary = {"prompts/best_mean": found.mean, "prompts/best": found.best.number} if finished else {}
        await store.update_run(self._folder.run_id, state="finished" if finished else "interrupted", summary=summary)
        return OptimizeResult(
            run_id=self._folder.run_id,
            folder=self._folder.path,
            seed=search.seed,
            best=found.best,
            mean=found.mean,
            reason=found.reason,
            finished=finished,
            means=dict(found.means),
            rewards=(search.rewards(search.seed), search.rewards(found.best)),
            promoted=promoted,
            rollouts=search.budget.rollouts,
            tokens=search.budget.used.tokens,
        )


def load_splits(config: Config) -> dict[Split, list[JSON]]:
    """The tasks of both splits. ConfigError where a template needs a field that they do not have."""
    data, seed = config.data, config.trainer.seed
    assert data.train is not None
    assert data.val is not None
    found: dict[Split, list[JSON]] = {
        "train": load_tasks(data.train, seed),
        "val": load_tasks(data.val, seed)[: config.eval.tasks],
    }
    config.check_tasks(found["train"])
    return found


async def searched(algorithm: PromptAlgorithm, run: StoreSearch, seed: int) -> SearchResult:
    """The result of a search, also of an algorithm that leaves a spent budget to its caller."""
    try:
        return await algorithm.search(run, seed)
    except BudgetSpentError as spent:  # nothing better than the start is known
        return SearchResult(best=run.seed, mean=None, reason=str(spent))
