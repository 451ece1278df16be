"""A game of two models that learn at once: one describes a colour in a word, the other guesses the colour from the word.

Each has its own tokenizer, its own reward and its own algorithm, and neither can succeed at the game alone: the guesser
learns what words mean only as the describer comes to use them so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from training import mistaken_model

import agentlightning as agl
from agentlightning.algorithms import LightningRL

pytestmark = pytest.mark.slow

CODE = {"red": "alpha", "green": "beta", "blue": "gamma", "black": "delta"}

AGENT = f"""
import agentlightning as agl
from openai import AsyncOpenAI

CODE = {CODE!r}


async def play(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)

    async def ask(model, text):
        messages = [{{"role": "user", "content": text}}]
        reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=3)
        return reply.choices[0].message.content

    word = await ask("describer", task["colour"])
    guess = await ask("guesser", word)
    agl.emit_reward(float(word == CODE[task["colour"]]), "described")
    agl.emit_reward(float(guess == task["colour"]), "guessed")
    return float(guess == task["colour"])
"""


def test_two_models_that_play_a_game_with_each_other_both_improve(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(AGENT)
    trainer = agl.Trainer(
        policies={
            "describer": {
                "model": mistaken_model(tmp_path / "describer", CODE, hidden=32),
                "algorithm": LightningRL(group_size=8, minibatches=1, reward_weights={"described": 1.0}),
            },
            "guesser": {
                "model": mistaken_model(
                    tmp_path / "guesser", {word: colour for colour, word in CODE.items()}, hidden=48
                ),
                "algorithm": LightningRL(
                    group_size=8, minibatches=2, advantage="rloo", loss="cispo", reward_weights={"guessed": 1.0}
                ),
                "learning_rate": 3e-3,
            },
        },
        steps=14,
        tasks_per_step=16,
        learning_rate=2e-3,
        workers=1,
        store=f"sqlite:///{tmp_path}/agl.db",
        runs=tmp_path / "runs",
        settings={"eval": {"sampled": False}},
    )
    tasks = [{"colour": colour} for colour in CODE]
    result = trainer.fit(f"{tmp_path}/game.py:play", train_dataset=tasks * 6, val_dataset=tasks)
    first, *_, last = (row for row in result.metrics if row["kind"] == "eval/greedy")
    for name in ("describer", "guesser"):
        assert first[f"policies/{name}/eval/greedy/reward_mean"] < 0.5
        assert last[f"policies/{name}/eval/greedy/reward_mean"] >= 0.75
    assert set(result.policies) == {"describer", "guesser"}
    assert all((folder / "model.safetensors").is_file() for folder in result.policies.values())
