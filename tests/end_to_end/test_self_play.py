"""Self-play: a policy plays a zero-sum game against an older version of itself that is never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

import agentlightning as agl
from agentlightning.algorithms import LightningRL
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.store.base import RolloutQuery

pytestmark = [pytest.mark.slow, pytest.mark.long]

MOVES = ["weak", "fair", "strong"]
SIDES = ["white", "black"]

AGENT = f"""
import agentlightning as agl
from openai import AsyncOpenAI

MOVES = {MOVES!r}


async def play(task, llm):
    async def move(side, model):
        client = AsyncOpenAI(
            base_url=llm.base_url,
            api_key=llm.api_key,
            http_client=llm.http_client,
            default_headers={{"x-agl-agent": side}},
        )
        messages = [{{"role": "user", "content": side}}]
        reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=2)
        words = (reply.choices[0].message.content or "").split()
        return MOVES.index(words[0]) if words and words[0] in MOVES else -1

    white = await move("white", llm.model)
    black = await move("black", task["black"])
    if task["strength"]:  # held out: how well white plays
        return white / 2
    return float((white > black) - (white < black))
"""


def model(folder: Path) -> str:
    """A model that makes any move, most often a weak one, on both sides."""
    dice = Random(0)
    moves = dice.choices(MOVES, weights=[6, 3, 2], k=400)
    demos = [
        [{"role": "user", "content": dice.choice(SIDES)}, {"role": "assistant", "content": move}] for move in moves
    ]
    tiny_model.build(folder, SIDES + MOVES, hidden=32, layers=1, context=32)
    imitate(folder, batches(encode_all(folder, demos), 0), Imitation(steps=120))
    return str(folder)


def test_a_player_against_its_older_self_becomes_strong(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(AGENT)
    trainer = agl.Trainer(
        policies={
            "player": {
                "model": model(tmp_path / "model"),
                "algorithm": LightningRL(group_size=8, minibatches=1),
            },
            "opponent": {"snapshot_of": "player"},
        },
        steps=9,
        tasks_per_step=16,
        learning_rate=4e-3,
        workers=1,
        store=f"sqlite:///{tmp_path}/agl.db",
        runs=tmp_path / "runs",
        settings={"eval": {"sampled": False}, "trainer": {"checkpoint_every": 3}},
    )
    train = [{"black": "opponent", "strength": False}]
    val = [{"black": "opponent", "strength": True}]
    result = trainer.fit(f"{tmp_path}/game.py:play", train_dataset=train * 16, val_dataset=val)
    first, *_, last = (row for row in result.metrics if row["kind"] == "eval/greedy")
    assert first["eval/greedy/reward_mean"] == 0.0
    assert last["eval/greedy/reward_mean"] == 1.0, "the player did not learn"
    steps = [row for row in result.metrics if row["kind"] == "step"]
    assert [row["policies/opponent/policy/snapshot_step"] for row in steps] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    asyncio.run(check_record(tmp_path, result.run_id))


async def check_record(folder: Path, run_id: str) -> None:
    """The opponent's calls say by which version they were answered, and none of them is learned from."""
    async with agl.SqlLightningStore(f"sqlite:///{folder}/agl.db") as store:
        published = await store.resources(run_id, "opponent", latest=False)
        assert [one.value["snapshot_step"] for one in published] == [0, 3, 6]
        rollouts = await store.rollouts(RolloutQuery(run_id=run_id, mode="train"))
        calls = await store.calls([one.id for one in rollouts])
        opponents = [call for call in calls if call.policy == "opponent"]
        assert {span.version for call in opponents for span in call.versions} == {0, 2, 3}
        assert {call.agent for call in opponents} == {"black"}
        assert len(opponents) == len(rollouts)
        learned = await store.credit([one.id for one in rollouts])
        assert len(learned) == len(calls) - len(opponents)
        assert not {one.call_id for one in learned} & {call.id for call in opponents}
