"""Forks of the demo's agents: is every replayed prompt the recorded one, what do they save, is an agent that acts by
chance caught?

Store, gateway, worker and engine are real. Rollouts are recorded; each is forked four times after every call but its
last. The agent of the arm `by_chance` is the SQL agent with a tool that adds a word to half of its answers: its forks
are caught where everything before the first prompt that differs was replayed, nothing from there on was, and
`replay_ended` names that call. Figures: forks; replayed_equal, of the calls that forks should replay the share that
they did, with the recorded ids in prompt and completion; saved_share, of the tokens of forked rollouts and their forks
those that were not sampled; differing, the forks with another prompt; caught, the share of those.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from claim import Cell, Claim, Outcome, warm_start, write_rows

from agentlightning.config.run import Config, parse_config
from agentlightning.demo import sql
from agentlightning.demo.tasks import CITIES, NAMES, answer_with_tool, load, rows
from agentlightning.records import JSON, Call, NewRollout, Rollout
from agentlightning.rendering.call_chain import call_chain, chain_prompt_ids
from agentlightning.store.base import LightningStore
from agentlightning.store.forks import new_forks, replay_ended
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.trainer.serving import rollouts_of, serve_model

CONTINUATIONS = 4
"""Forks of a rollout after each of its calls but the last."""
FORKS = {**dict.fromkeys(NAMES, 334), "by_chance": 250}
READ_ROLLOUTS = 256


async def solve(task: JSON, llm: Any) -> float:
    """The demo's agent of the task, or the one that acts by chance."""
    if task["demo"] != "by_chance":
        return await load(task["demo"]).solve(task, llm)
    with closing(sql.database(task["database"])) as company:

        def execute(query: str) -> str:
            answer = sql.execute(company, query)
            return answer if random.random() < 0.5 else f"{answer} {random.choice(CITIES)}"

        return await answer_with_tool(task, llm, execute, sql.SPECIAL_WORDS, sql.MAX_CALLS, sql.MAX_TOKENS)


@dataclass
class Recorded:
    """A finished rollout with its calls in the order in which they began."""

    rollout: Rollout
    calls: list[Call]
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        by_id = {call.id: call for call in self.calls}
        self.prompts = [chain_prompt_ids(call_chain(call, by_id)) for call in self.calls]

    @property
    def tokens(self) -> tuple[int, int]:
        """Sampled ones, and all of its completions."""
        made = sum(len(call.sampled_ids) for call in self.calls if call.replayed_id is None)
        return made, sum(len(call.sampled_ids) for call in self.calls)


def measure(cell: Cell) -> Outcome:
    demo, wanted = "sql" if cell.arm == "by_chance" else cell.arm, 16 if cell.quick else FORKS[cell.arm]
    model = Cell(cell.claim, cell.arm, cell.seed, cell.place)
    warm_start(model, demo)
    run = RunFolder(cell.place / "runs", cell.arm.replace("_", "-"))
    run.make()
    tasks = [row | {"demo": cell.arm} for row in rows(load(demo), "train", max(16, wanted), cell.seed)]
    agent = {"run": f"{__file__}:solve", "workers": 1, "concurrency": 48, "timeout_s": 60}
    table = {
        "model": {"path": str(model.model)},
        "agent": agent,
        "data": {"train": str(write_rows(cell.place / "train.jsonl", tasks))},
        "trainer": {"seed": cell.seed},
        "engine": {"device": "cpu"},
        "store": {"url": f"sqlite:///{cell.place}/agl.db"},
    }
    return Outcome([], asyncio.run(fork_all(parse_config(table, "forks"), run, wanted)))


async def fork_all(config: Config, run: RunFolder, wanted: int) -> dict[str, float]:
    """Records rollouts, forks them as often as is wanted, and compares."""
    async with serve_model(config, run, Silent(), "forks") as (collector, processes):
        return await processes.beside(_fork_all(processes.store, collector, config, wanted))


async def _fork_all(
    store: LightningStore, collector: RolloutCollector, config: Config, wanted: int
) -> dict[str, float]:
    tasks = load_tasks(str(config.data.train), config.trainer.seed)
    new = rollouts_of(config, collector.run_id, tasks, mode="train", group="recorded", replicas=1, max_attempts=1)
    origins = {one.rollout.id: one for one in await read(store, await collector.collect(new))}
    forks: list[NewRollout] = []
    for rollout_id, origin in origins.items():
        for calls in range(1, len(origin.calls)):
            forks += (await new_forks(store, rollout_id, calls, CONTINUATIONS))[: wanted - len(forks)]
    made = await read(store, await collector.collect(forks))
    forked = {one.rollout.fork.rollout_id for one in made if one.rollout.fork}
    tokens = [one.tokens for one in (*made, *(origins[rollout_id] for rollout_id in forked))]
    counts = [compared(origins[one.rollout.fork.rollout_id], one) for one in made if one.rollout.fork]
    expected, equal, differing, caught = (sum(column) for column in zip(*counts, strict=True))
    return {
        "forks": len(made),
        "replayed_equal": equal / max(1, expected),
        "saved_share": 1 - sum(sampled for sampled, _ in tokens) / max(1, sum(whole for _, whole in tokens)),
        "differing": differing,
        **({"caught": caught / differing} if differing else {}),
    }


async def read(store: LightningStore, rollouts: list[Rollout]) -> list[Recorded]:
    """The rollouts with their calls; they have one attempt each."""
    found = []
    for start in range(0, len(rollouts), READ_ROLLOUTS):
        calls: dict[str, list[Call]] = {rollout.id: [] for rollout in rollouts[start : start + READ_ROLLOUTS]}
        for call in await store.calls(list(calls)):
            calls[call.rollout_id].append(call)
        some = rollouts[start : start + READ_ROLLOUTS]
        found += [Recorded(one, sorted(calls[one.id], key=lambda call: call.id)) for one in some]
    return found


def compared(origin: Recorded, fork: Recorded) -> tuple[int, int, bool, bool]:
    """(calls that it should replay, those it did, whether a prompt differs before, whether that is caught)."""
    assert fork.rollout.fork is not None
    expected = fork.rollout.fork.calls
    pairs = list(zip(origin.calls, origin.prompts, fork.calls, fork.prompts, strict=False))[:expected]
    same_prompt = [before == after for _, before, _, after in pairs]
    equal = sum(
        call.replayed_id == recorded.id and before == after and call.sampled_ids == recorded.sampled_ids
        for recorded, before, call, after in pairs
    )
    differs = same_prompt.index(False) if False in same_prompt else expected
    replayed = [call.replayed_id for call in fork.calls]
    caught = (
        differs < expected
        and replayed[:differs] == [call.id for call in origin.calls[:differs]]
        and not any(replayed[differs:])
        and replay_ended(fork.rollout, fork.calls) == differs
    )
    return expected, equal, differs < expected, caught


CLAIMS = {"forks": Claim(arms=tuple(FORKS), measure=measure, seeds=1)}
