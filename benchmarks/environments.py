"""Cost of an episode: 32 at once through the player, against the loop that one writes around the environment by hand.

    python benchmarks/environments.py [--kinds KIND,KIND] [--episodes 32]

Both play the same tasks in one process, in turns, with the same scripted model on loopback: the loop by hand asks it with
the OpenAI SDK and keeps the conversation. Last line, by kind: {"episodes_per_s", "cpu_s_per_episode", "mb_at_32",
"equal_at_32", "over_own_loop"}: CPU seconds include the scripted model's; equal: results at once equal those alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from agentlightning.environments.base import EpisodeResult, open_environment
from agentlightning.environments.gymnasium import ACTIONS
from agentlightning.environments.local_model import Answer, local_models
from agentlightning.records import JSON

ROUNDS = 3
Ask = Callable[[str], Awaitable[str]]
"""The next message of a conversation to its answer."""


async def own_gymnasium(row: JSON, ask: Ask) -> None:
    import gymnasium

    game = gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False, desc=row["desc"])
    game.reset(seed=row["seed"])
    over = cut = False
    while not (over or cut):
        action = await ask(str(game.render()))
        _, _, over, cut, _ = game.step(ACTIONS["FrozenLake"].split().index(action.strip("[]")))


async def own_textarena(row: JSON, ask: Ask) -> None:
    import textarena

    game, over = textarena.make("FrozenLake-v0-raw", size=4), False
    game.reset(num_players=1, seed=row["seed"])
    for _ in range(64):
        _, seen = game.get_observation()
        over, _ = game.step(await ask("\n".join(text for _, text, _ in seen)))
        if over:
            game.close()
            return


async def own_reasoning_gym(row: JSON, ask: Ask) -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", seed=row["seed"], size=1, max_digits=2)
    dataset.score_answer(await ask(dataset[0]["question"]), dataset[0])


@dataclass(frozen=True)
class Kind:
    """An environment by name, its loop by hand, and the actions of the model, again and again."""

    name: str
    own: Callable[[JSON, Ask], Awaitable[None]]
    actions: tuple[str, ...]

    def answer(self) -> Answer:
        left = iter(self.actions * 100)

        async def answer(request: JSON) -> JSON:
            return {"role": "assistant", "content": next(left)}

        return answer

    def play(self, rows: list[JSON]) -> list[Any]:
        """All rows at once, through the player."""

        async def play() -> list[Any]:
            environment = open_environment(self.name)
            async with local_models() as model:
                played = await asyncio.gather(*(environment.play(row, model(self.answer())) for row in rows))
            environment.close()
            results = [one if isinstance(one, EpisodeResult) else EpisodeResult(reward=one) for one in played]
            return [(one.reward, one.success, dict(one.metrics)) for one in results]

        return asyncio.run(play())

    def by_hand(self, rows: list[JSON]) -> None:
        """All rows at once, by the loop that one writes."""

        async def play() -> None:
            async with local_models() as model, AsyncOpenAI(base_url="http://none", api_key="none") as client:
                await asyncio.gather(*(self.own(row, _asking(client, model(self.answer()).base_url)) for row in rows))

        asyncio.run(play())


def _asking(client: AsyncOpenAI, base_url: str) -> Ask:
    messages: list[Any] = []
    own = client.with_options(base_url=base_url)

    async def ask(text: str) -> str:
        messages.append({"role": "user", "content": text})
        reply = await own.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return str(reply.choices[0].message.content)

    return ask


KINDS = {
    "gymnasium": Kind("gymnasium:FrozenLake-v1?is_slippery=false", own_gymnasium, ("[left]", "[up]")),
    "textarena": Kind("textarena:FrozenLake-v0?size=4", own_textarena, ("[left]", "[up]")),
    "reasoning-gym": Kind("reasoning-gym:chain_sum?max_digits=2", own_reasoning_gym, ("<answer>7</answer>",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--episodes", type=int, default=32)
    given = parser.parse_args()
    figures = {name: measure(KINDS[name], given.episodes) for name in given.kinds.split(",")}
    print(json.dumps(figures))


def measure(kind: Kind, episodes: int) -> JSON:
    environment = open_environment(kind.name)
    rows = [*environment.tasks("train", episodes, 0)]
    environment.close()
    kind.by_hand(rows[:1]), kind.play(rows[:1])  # imports and first connections
    ours, theirs, walls = [], [], []
    for _ in range(ROUNDS):
        for work, found in ((kind.by_hand, theirs), (kind.play, ours)):
            cpu, wall = time.process_time(), time.perf_counter()
            work(rows)
            found.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
    together, alone = kind.play(rows), [one for row in rows for one in kind.play([row])]
    return {
        "episodes_per_s": round(episodes / min(walls), 1),
        "cpu_s_per_episode": round(min(ours) / episodes, 5),
        "mb_at_32": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "equal_at_32": together == alone,
        "over_own_loop": round(min(ours) / min(theirs), 2),
    }


if __name__ == "__main__":
    main()
