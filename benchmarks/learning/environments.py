"""Environments by name: a tiny model that imitated a bad player learns from reward what a random reward does not teach.

The player's episodes are recorded through `play`, a model is made of them by `agl models import`, and `agl train --env`
trains it, in every seed from the same model. Maps, items and openings are held out by content, which every run checks. Arms:
the reward, and a coin flip.
Figures: before_t1, after_t1 at temperature 1; rollouts.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from claim import AGL, Cell, Claim, Outcome, execute, train, write_rows

from agentlightning.environments.base import open_environment
from agentlightning.environments.local_model import local_models
from agentlightning.records import JSON

EPISODES, AT_ONCE = 600, 50
Player = Callable[[random.Random, str], str]
COIN = """
import random


def reward(task, result):
    return float(random.random() < 0.5)
"""
SETTINGS = {
    "trainer.tasks_per_step": 16,
    "trainer.learning_rate": 1e-3,
    "model.max_tokens": 24,
    "engine.device": "cpu",
    "agent.workers": 1,
}


def walk(rng: random.Random, seen: str) -> str:
    """A step over the lake: a third of the time the shortest way, else anywhere."""
    rows = [row for row in seen.splitlines() if re.fullmatch(r"[SFHG<>]+", row)]
    cells = [re.findall(r"<.>|.", row) for row in rows]
    start = next((y, x) for y, row in enumerate(cells) for x, cell in enumerate(row) if cell.startswith("<"))
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    ways, known = deque([(start, "")]), {start}
    while ways and rng.random() < 0.95:
        (y, x), first = ways.popleft()
        if cells[y][x].strip("<>") == "G":
            return f"[{first if rng.random() < 0.55 else rng.choice([*moves])}]"
        for name, (down, right) in moves.items():
            place = (y + down, x + right)
            inside = 0 <= place[0] < len(cells) and 0 <= place[1] < len(cells)
            if inside and place not in known and cells[place[0]][place[1]].strip("<>") != "H":
                known.add(place)
                ways.append((place, first or name))
    return f"[{rng.choice([*moves])}]"


def choose(rng: random.Random, seen: str) -> str:
    """Any free square."""
    return rng.choice(re.findall(r"\[\d\]", seen.rpartition("Available Moves")[2]) or ["[4]"])


def agree(rng: random.Random, seen: str) -> str:
    """Yes or No, by chance."""
    return f"<answer>{rng.choice(['Yes', 'No'])}</answer>"


ENVIRONMENTS: dict[str, tuple[str, Player, int]] = {
    "gymnasium": ("gymnasium:FrozenLake-v1?is_slippery=false", walk, 60),
    "textarena": ("textarena:TicTacToe-v0", choose, 30),
    "reasoning-gym": ("reasoning-gym:syllogism", agree, 30),
}
"""By kind: the environment's name, its player, and the steps of a run."""


async def record(name: str, player: Player, seed: int) -> list[JSON]:
    """Conversations of the player's episodes, and its success."""
    environment, rng = open_environment(name), random.Random(seed)
    rows, told = [*environment.tasks("train", EPISODES, seed)], []

    async def episode(row: JSON) -> bool:
        talk: list[JSON] = []

        async def answer(request: JSON) -> JSON:
            reply = {"role": "assistant", "content": player(rng, str(request["messages"][-1]["content"]))}
            talk[:] = [*request["messages"], reply]
            return reply

        result = await environment.play(row, model(answer))
        told.append({"messages": talk})
        return bool(getattr(result, "success", False))

    solved = 0
    async with local_models() as model:
        for first in range(0, len(rows), AT_ONCE):
            solved += sum(await asyncio.gather(*map(episode, rows[first : first + AT_ONCE])))
    environment.close()
    print(f"{name}: the player solves {solved / len(rows):.2f}", flush=True)
    return told


def imitator(cell: Cell) -> Path:
    """The model of every seed: its imitation takes longer than a run."""
    return cell.folder.parent / "model"


def prepare(kind: str, cell: Cell) -> None:
    if imitator(cell).exists():
        return
    name, player, _ = ENVIRONMENTS[kind]
    demos = write_rows(cell.folder / "demos.jsonl", asyncio.run(record(name, player, 500)))
    execute(cell, "model", *AGL, "models", "import", demos, "--to", imitator(cell), "--seed", "0")


def measure(kind: str, cell: Cell) -> Outcome:
    """One arm with one seed."""
    name, _, steps = ENVIRONMENTS[kind]
    settings = SETTINGS | {
        "trainer.seed": cell.seed,
        "trainer.steps": steps,
        "eval.every": steps // 2,
        "model.path": str(imitator(cell)),
        "env.name": name,
    }
    if cell.quick:
        settings |= {"trainer.steps": 4, "eval.every": 0, "eval.tasks": 20}
    if cell.arm == "random":
        coin = cell.place / "coin.py"
        coin.write_text(COIN)
        settings["agent.reward"] = f"{coin}:reward"
    config = cell.place / "train.toml"
    config.write_text("")
    _, rows = train(cell, config, settings)
    greedy, sampled = ([row for row in rows if row["kind"] == f"eval/{each}"] for each in ("greedy", "sampled"))
    return Outcome(
        points=[(row["step"], row["eval/greedy/success_mean"]) for row in greedy],
        figures={
            "before_t1": sampled[0]["eval/sampled/success_mean"],
            "after_t1": sampled[-1]["eval/sampled/success_mean"],
            "rollouts": sum(row["rollout/count"] for row in rows if row["kind"] == "step"),
        },
    )


CLAIMS = {
    f"environments-{kind}": Claim(
        arms=("random", "reward"), measure=partial(measure, kind), prepare=partial(prepare, kind)
    )
    for kind in ENVIRONMENTS
}
