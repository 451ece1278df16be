"""Doubles of what a prompt search uses: agents whose reward is the number of good words in their prompt, a model that adds a
word to the text that it is sent, and a small search of its own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
from loop_doubles import answer, working

import build
from agentlightning.algorithms.prompts.search import (
    PromptAlgorithm,
    PromptCandidate,
    ScoreRequest,
    SearchResult,
    SearchRun,
)
from agentlightning.config.run import Config, parse_config
from agentlightning.errors import BudgetSpentError, InputError
from agentlightning.records import Call, Claim, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.processes import put_gateway_settings
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.prompts.optimizer_model import GatewayModel
from agentlightning.trainer.prompts.store_search import Budget, CandidateBook, StoreSearch
from agentlightning.trainer.scheduler import RolloutCollector

GOOD = ("verify", "cite", "plan")
WORDS = ("verify", "hurry", "cite", "plan", "guess")
RUN = "run"
START = "Answer {question}."


def config(texts: Mapping[str, Any] | None = None, **optimize: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "agent": {"run": "a.py:f"},
            "data": {"train": "t", "val": "v"},
            "algorithm": {"type": "a.py:Search"},
            "prompts": {"templates": texts or {"system": START}},
            "external": {
                "writer": {
                    "url": "https://h/v1",
                    "models": ["w-1"],
                }
            },
            "optimize": {"model": "writer", **optimize},
        }
    )


@dataclass
class Writer:
    """A hosted model behind the gateway: it records a call and answers, as the gateway does. One word is added for each
    number in the request."""

    store: LightningStore
    answer: Callable[[str], str] = lambda prompt: f"{prompt.partition('|')[2]} {WORDS[int(prompt.split()[0])]}"
    refuse: list[int] = field(default_factory=list)
    """Status codes to give first."""
    prompts: list[str] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refuse:
            return httpx.Response(self.refuse.pop(0), text="not now")
        found = re.fullmatch(r"/r/([^/]+)/(\d+)/v1/(chat/completions|messages)", request.url.path)
        assert found is not None
        body = json.loads(request.content)
        prompt = body["messages"][0]["content"]
        self.prompts.append(prompt)
        [rollout] = await self.store.rollouts(RolloutQuery(ids=[found[1]]))
        await self.store.append_calls([hosted_call(rollout, int(found[2]), body["model"], self.answer(prompt))])
        return httpx.Response(200, json={})


def hosted_call(rollout: Rollout, attempt: int, model: str, text: str) -> Call:
    return build.call(
        replace(rollout, attempt=attempt),
        f"{rollout.id}-{attempt}",
        suffix_ids=[],
        sampled_ids=[],
        versions=[],
        policy="",
        model=model,
        messages=[],
        completion={"role": "assistant", "content": text},
        usage={"prompt_tokens": 10, "sampled_tokens": 2},
    )


async def text_of(store: LightningStore, rollout: Rollout, name: str = "system") -> str:
    """The text that a rollout had."""
    [version] = await store.resources(rollout.run_id, name, version=rollout.prompts[name])
    return str(version.value["template"])


def share_of_good_words(text: str, claim: Claim) -> float:
    return sum(word in text for word in GOOD) / len(GOOD)


@asynccontextmanager
async def prompted_agents(
    store: LightningStore,
    reward: Callable[[str, Claim], float] = share_of_good_words,
    failed: Callable[[str], bool] = lambda text: False,
) -> AsyncIterator[None]:
    """Agents that survive the search's crashes; those whose prompt is `failed` end in an error."""
    if not await store.runs([RUN]):
        await store.create_run("optimize test", {}, RUN)  # nobody works for a run that is not there

    async def work(claim: Claim, _: asyncio.TaskGroup) -> None:
        text = await text_of(store, claim.rollout)
        await answer(store, claim, 1, reward(text, claim), failed(text))

    async with working(store, RUN, work):
        yield


@dataclass(frozen=True, kw_only=True)
class GreedySearch(PromptAlgorithm):
    """Asks for one more word each round, and keeps what is better on training tasks."""

    name: ClassVar[str] = "greedy"
    rounds: int = len(WORDS)

    async def search(self, run: SearchRun, seed: int) -> SearchResult:
        best, means, reason = run.seed, dict[int, float](), "every word was tried"
        try:
            means[0] = await self._val(run, best)
            for number in range(self.rounds):
                text = await run.ask(f"{number} add a word to |{best.texts['system']}", "edit", number)
                try:
                    child = await run.propose({"system": text}, [best], "greedy")
                except InputError as refused:
                    run.note(str(refused))
                    continue
                tasks = tuple(range(run.sizes["train"]))
                before, after = await run.evaluate(
                    [ScoreRequest(candidate=one, split="train", tasks=tasks) for one in (best, child)]
                )
                if sum(one.reward for one in after) > sum(one.reward for one in before):
                    means[child.number] = await self._val(run, child)
                    best = child
        except BudgetSpentError as spent:
            reason = str(spent)
        return SearchResult(best=best, mean=means.get(best.number), reason=reason, means=means)

    async def _val(self, run: SearchRun, candidate: PromptCandidate) -> float:
        request = ScoreRequest(candidate=candidate, split="val", tasks=tuple(range(run.sizes["val"])))
        [scores] = await run.evaluate([request])
        return sum(one.reward for one in scores) / len(scores)


async def make_run(store: LightningStore, settings: Config) -> None:
    """The run as a search finds it: its templates, its external models and its policy."""
    if not await store.runs([RUN]):
        await store.create_run("optimize test", {}, RUN)
    await put_gateway_settings(settings, RUN, store)
    if not any(one.kind == "policy" for one in await store.resources(RUN)):
        await store.put_resources([Resource(run_id=RUN, name="default", kind="policy", value={"model": "m"})])


@asynccontextmanager
async def searching(
    store: Any, folder: Path, writer: Writer, settings: Config | None = None, progress: Progress | None = None
) -> AsyncIterator[StoreSearch]:
    """A search of the run, as if its process had just started."""
    settings = settings or config()
    assert settings.optimize is not None
    await make_run(store, settings)
    run_folder = RunFolder(folder, RUN)
    run_folder.create(settings)
    progress = progress or Silent()
    book = CandidateBook(store, RUN, settings.optimize.templates or tuple(settings.prompts.templates))
    async with httpx.AsyncClient(transport=httpx.MockTransport(writer), base_url="http://gateway") as client:
        model = GatewayModel(store, RUN, client, "w-1")
        model.first_pause_s = 0.0
        await model.open(await store.resources(RUN))
        yield StoreSearch(
            config=settings,
            store=store,
            collector=RolloutCollector(store, RUN),
            book=book,
            answer=model.ask,
            budget=Budget(settings.optimize),
            tasks={
                "train": [{"question": f"t{n}"} for n in range(3)],
                "val": [{"question": f"v{n}"} for n in range(4)],
            },
            seed=await book.open(),
            logger=MetricLogger(run_id=RUN, folder=run_folder, store=store, progress=progress, rules={}),
            progress=progress,
        )
