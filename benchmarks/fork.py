"""Forks of the demo's agents: is every replayed prompt the recorded one, what do they save, is an agent that acts by chance
caught?

    python benchmarks/fork.py [--forks 1000] [--seed 0] [--models FOLDER]

Everything is real: a store, a gateway, a worker process, and for each of the demo's tasks the engine that samples from its
warm-started model. Rollouts are recorded; each is then forked four times after every call but its last.
The agent that acts by chance is the demo's SQL agent with a tool that adds a word to half of its answers; it gets a quarter
of the forks besides. Its forks are caught where everything before the first prompt that differs was replayed, nothing from
there on was, and `replay_ended` names that call.

Last line: {"replayed_equal", "saved_share", "caught", …}: of the calls that the forks of the demo's agents should replay,
the share that they did replay, with the recorded ids in prompt and completion; of the tokens in the completions of all
complete rollouts (forked ones and their forks) the share that was not sampled; of the forks by chance whose prompt differs
the share that is caught. `differing` is their number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import fork_agent
from agentlightning.config.run import Config, parse_config
from agentlightning.demo.tasks import NAMES, load, rows
from agentlightning.demo.training import warm_start
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
BY_CHANCE = "by chance"
AGENTS = {**{name: name for name in NAMES}, BY_CHANCE: "sql"}
"""The task that each agent solves."""
READ_ROLLOUTS = 256


@dataclass
class Figures:
    """Counts over the forks of an agent."""

    forks: int = 0
    expected: int = 0
    """Calls that the forks should replay."""
    equal: int = 0
    sampled: int = 0
    """Tokens sampled for the rollouts that were forked, and for their forks."""
    whole: int = 0
    """Tokens of all their completions."""
    differing: int = 0
    """Forks with a prompt that differs before the replay should end."""
    caught: int = 0

    def plus(self, other: Figures) -> Figures:
        return Figures(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


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
    def sampled(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls if call.replayed_id is None)

    @property
    def whole(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=1000, help="of the demo's agents, together [1000]")
    parser.add_argument("--seed", type=int, default=0, help="of models and tasks [0]")
    parser.add_argument("--models", type=Path, help="warm-started models are kept here; none: made anew each time")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        by_agent = asyncio.run(measure(Path(folder), given.models or Path(folder), given.forks, given.seed))
    print(json.dumps(summary(by_agent) | {"wall_s": round(time.monotonic() - started, 1)}))


def summary(by_agent: dict[str, Figures]) -> JSON:
    """The last line."""
    chance = by_agent[BY_CHANCE]
    demo = Figures()
    for name in NAMES:
        demo = demo.plus(by_agent[name])
    return {
        "replayed_equal": share(demo.equal, demo.expected),
        "saved_share": round(1 - share(demo.sampled, demo.whole), 4),
        "caught": share(chance.caught, chance.differing),
        "forks": demo.forks,
        "differing": chance.differing,
        "saved_by_agent": {name: round(1 - share(by_agent[name].sampled, by_agent[name].whole), 4) for name in NAMES},
    }


def share(part: int, whole: int) -> float:
    return part / max(1, whole)


async def measure(folder: Path, models: Path, forks: int, seed: int) -> dict[str, Figures]:
    """Figures by agent. A model that is not in `models` is warm-started there."""
    found = {}
    wanted = {name: -(-forks // len(NAMES)) for name in NAMES} | {BY_CHANCE: -(-forks // 4)}
    for agent, task in AGENTS.items():
        model = models / f"{task}-{seed}"
        if not model.exists():
            await warm_start(task, seed, model, Silent())
        run = RunFolder(folder / "runs", agent.replace(" ", "-"))
        config = configure(run, agent, model, wanted[agent], seed, f"sqlite:///{folder}/agl.db")
        async with serve_model(config, run, Silent(), "forks") as (collector, processes):
            found[agent] = await processes.beside(fork_all(processes.store, collector, config, wanted[agent]))
        print(agent, found[agent], flush=True)
    return found


def configure(run: RunFolder, agent: str, model: Path, forks: int, seed: int, store: str) -> Config:
    """A run of an agent, with a rollout for each fork: few of them make too few calls."""
    run.make()
    tasks = [row | {"demo": agent} for row in rows(load(AGENTS[agent]), "train", max(16, forks), seed)]
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(model.resolve())},
        "agent": {
            "run": f"{Path(fork_agent.__file__).resolve()}:solve",
            "workers": 1,
            "concurrency": 48,
            "timeout_s": 60,
        },
        "data": {"train": run.write_tasks("train.jsonl", tasks)},
        "trainer": {"seed": seed},
        "engine": {"device": "cpu"},
        "store": {"url": store},
    }
    return parse_config(table, "forks")


async def fork_all(store: LightningStore, collector: RolloutCollector, config: Config, wanted: int) -> Figures:
    """Record rollouts, fork them as often as is wanted, and compare."""
    tasks = load_tasks(str(config.data.train), config.trainer.seed)
    new = rollouts_of(config, collector.run_id, tasks, mode="train", group="recorded", replicas=1, max_attempts=1)
    origins = {one.rollout.id: one for one in await read(store, await collector.collect(new))}
    forks: list[NewRollout] = []
    for rollout_id, origin in origins.items():
        for calls in range(1, len(origin.calls)):
            if len(forks) < wanted:
                forks += (await new_forks(store, rollout_id, calls, CONTINUATIONS))[: wanted - len(forks)]
    figures = Figures()
    forked = set()
    for one in await read(store, await collector.collect(forks)):
        assert one.rollout.fork is not None
        forked.add(one.rollout.fork.rollout_id)
        figures = figures.plus(compared(origins[one.rollout.fork.rollout_id], one))
    for rollout_id in forked:
        figures.sampled += origins[rollout_id].sampled
        figures.whole += origins[rollout_id].whole
    return figures


async def read(store: LightningStore, rollouts: Sequence[Rollout]) -> list[Recorded]:
    """The rollouts with their calls; they have one attempt each."""
    found = []
    for start in range(0, len(rollouts), READ_ROLLOUTS):
        some = rollouts[start : start + READ_ROLLOUTS]
        calls: dict[str, list[Call]] = {rollout.id: [] for rollout in some}
        for call in await store.calls(list(calls)):
            calls[call.rollout_id].append(call)
        found += [Recorded(one, sorted(calls[one.id], key=lambda call: call.id)) for one in some]
    return found


def compared(origin: Recorded, fork: Recorded) -> Figures:
    """The figures of one fork, against the rollout that it continues."""
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
    recorded_ids = [call.id for call in origin.calls[:differs]]
    caught = (
        differs < expected
        and replayed[:differs] == recorded_ids
        and not any(replayed[differs:])
        and replay_ended(fork.rollout, fork.calls) == differs
    )
    return Figures(
        forks=1,
        expected=expected,
        equal=equal,
        sampled=fork.sampled,
        whole=fork.whole,
        differing=int(differs < expected),
        caught=int(caught),
    )


if __name__ == "__main__":
    main()
