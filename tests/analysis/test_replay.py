"""A rollout call by call, by keys and without them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from stored_runs import Earned, add_rollouts, record
from typer.testing import CliRunner

from agentlightning.analysis.replay import Replay, play, print_replay, read_replay
from agentlightning.cli.app import app
from agentlightning.errors import InputError, NotFoundError
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
from agentlightning.trainer.display import LiteralConsole

RIGHT, LEFT, DOWN, END, HOME = "\x1b[C", "\x1b[D", "\x1b[B", "\x1b[F", "\x1b[H"
EARNED = Earned(group="a", reward=0.5, calls=(1, 300, 1), step_rewards={1: 0.25})


@pytest.fixture
async def replay() -> Replay:
    async with InMemoryLightningStore() as store:
        await store.create_run("run", record(), "run")
        (rollout,) = await add_rollouts(store, "run", 1, [EARNED])
        with pytest.raises(InputError, match="attempt: expected 1 to 1, got 2"):
            await read_replay(store, rollout, 2)
        with pytest.raises(NotFoundError, match="none: no such rollout"):
            await read_replay(store, "none")
        return await read_replay(store, rollout)


def screens(replay: Replay, *keys: str) -> list[str]:
    """The screen before each key, and before the last one, which quits."""
    file, shown = io.StringIO(), list[str]()
    console = LiteralConsole(file=file, force_terminal=True, width=80, height=12, markup=False, highlight=False)

    def pressed() -> Iterator[str]:
        for key in (*keys, "q"):
            shown.append(file.getvalue())
            file.seek(0)
            file.truncate()
            yield key

    play(console, replay, pressed().__next__)
    return shown


def test_frames_have_the_rewards_and_times_of_their_calls(replay: Replay) -> None:
    assert [(one.number, one.started_s, one.seconds) for one in replay.frames] == [
        (1, 0, 0.5),
        (2, 1, 0.5),
        (3, 2, 0.5),
    ]
    assert [[reward.value for reward in one.rewards] for one in replay.frames] == [[], [0.25], []]
    assert [reward.value for reward in replay.final_rewards] == [0.5]


def test_right_and_left_go_from_call_to_call_and_stop_at_the_ends(replay: Replay) -> None:
    found = screens(replay, RIGHT, LEFT, LEFT, END, RIGHT, HOME)
    assert ["call 1 of 3" in one for one in found] == [True, False, True, True, False, False, True]
    assert "question 0" in found[0]
    assert "call 2 of 3" in found[1]
    assert "final reward 0.5 (function)" in found[4]
    assert "call 3 of 3" in found[5]


def test_a_long_call_is_scrolled_and_the_next_one_begins_at_its_top(replay: Replay) -> None:
    found = screens(replay, RIGHT, *[DOWN] * 40, RIGHT)
    assert "lines more" in found[1]
    assert "reward reward 0.25 (function)" not in found[1]
    assert "reward reward 0.25 (function)" in found[-2]
    assert "lines more" not in found[-2]
    assert "question 2" in found[-1]


def test_a_screen_is_never_larger_than_the_terminal(replay: Replay) -> None:
    assert {one.count("\n") for one in screens(replay, RIGHT, DOWN, END)} <= {11, 12}


def test_what_was_said_moves_no_cursor(replay: Replay) -> None:
    call = replay.frames[0].call
    call.completion["content"] = "\x1b[2Jgone"
    assert "\\x1b[2Jgone" in screens(replay)[0]
    console = LiteralConsole(file=io.StringIO(), width=200, markup=False)
    print_replay(console, replay)
    assert "\\x1b[2Jgone" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_piped_it_prints_all_and_as_json_everything(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with SqlLightningStore(url) as store:
        await store.create_run("run", record(), "run")
        (rollout,) = await add_rollouts(store, "run", 1, [EARNED])

    async def agl(*words: str) -> str:
        done = await asyncio.to_thread(
            CliRunner().invoke, app, ["rollouts", "show", rollout, "--browse", *words, "--store", url]
        )
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    told = await agl()
    assert [f"question {n}" in told for n in range(3)] == [True] * 3
    assert "final reward 0.5" in told
    found = orjson.loads(await agl("--json"))
    assert [len(one["call"]["sampled_ids"]) for one in found["frames"]] == [1, 300, 1]
    assert found["rollout"]["reward"] == 0.5
