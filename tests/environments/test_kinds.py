"""Every kind that is played here keeps the contract; what is particular to one stands below."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning
from agentlightning.environments.base import EnvironmentName, EpisodeResult, open_environment, seeds
from agentlightning.environments.checks import tool_call
from agentlightning.environments.gymnasium import describe_grid
from agentlightning.environments.local_model import local_models
from agentlightning.environments.packages import environment_folder, install
from agentlightning.environments.player import Action, UnreadableActionError, text_command
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.testing.environment_contract import *  # noqa: F403

KINDS = {
    "reasoning-gym:chain_sum?max_digits=2": "<answer>7</answer>",
    "gymnasium:FrozenLake-v1?is_slippery=false": "[right]",
    "gymnasium:Blackjack-v1": "hit",
    "gymnasium:MiniGrid-LavaGapS5-v0": "[forward]",
    "textarena:FrozenLake-v0?size=4": "[right]",
    "textarena:KuhnPoker-v0": "[bet]",
    "textarena:Blackjack-v0": "[hit]",
}


@pytest.fixture(params=KINDS)
def environment_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def answers(environment_name: str) -> Callable[[JSON], str]:
    return lambda request: KINDS[environment_name]


def play(name: str, answer: Callable[[JSON], str], task: int = 0) -> tuple[EpisodeResult, list[JSON]]:
    """EpisodeResult and requests of one training task."""
    environment, requests = open_environment(name), list[JSON]()

    async def reply(request: JSON) -> JSON:
        requests.append(request)
        return {"role": "assistant", "content": answer(request)}

    async def played() -> EpisodeResult:
        rows = list(environment.tasks("train", task + 1, 0))
        async with local_models() as model:
            outcome = await environment.play(rows[task], model(reply))
        assert isinstance(outcome, EpisodeResult)
        return outcome

    outcome = asyncio.run(played())
    environment.close()
    return outcome, requests


def test_a_right_answer_of_reasoning_gym_is_a_success() -> None:
    def answer(request: JSON) -> str:
        sum_text = request["messages"][-1]["content"].partition(":")[2].partition("=")[0]
        return f"<answer>{eval(sum_text)}</answer>"

    outcome, _ = play("reasoning-gym:chain_sum?max_digits=2", answer)
    assert (outcome.reward, outcome.success) == (1.0, True)


def test_an_answer_without_tags_is_none() -> None:
    outcome, _ = play("reasoning-gym:prime_factorization", lambda request: "hello")
    assert (outcome.reward, outcome.success, outcome.metrics["unanswered"]) == (0.0, False, 1.0)


def test_text_that_a_verifier_of_reasoning_gym_cannot_read_scores_nothing() -> None:
    outcome, _ = play("reasoning-gym:prime_factorization", lambda request: "<answer>hello</answer>")
    assert (outcome.reward, outcome.metrics["unanswered"]) == (0.0, 0.0)


def test_falling_into_a_hole_of_textarena_pays_and_is_no_success() -> None:
    outcomes = [play("textarena:FrozenLake-v0?size=4", lambda request: "[down]", task)[0] for task in range(8)]
    assert any(0 < one.reward < 1 for one in outcomes)
    assert not any(one.success for one in outcomes)


def test_observations_extend_the_conversation_and_mark_the_players_place() -> None:
    _, requests = play("gymnasium:FrozenLake-v1?is_slippery=false", lambda request: "[right]")
    first, second = requests[0]["messages"], requests[1]["messages"]
    assert second[: len(first)] == first
    assert first[-1]["content"].startswith("<S>")
    assert second[-1]["content"].splitlines()[0][1:4].startswith("<")


def test_an_unreadable_action_is_answered_once_and_then_ends_the_episode() -> None:
    outcome, requests = play("gymnasium:FrozenLake-v1", lambda request: "what?")
    assert [len(request["messages"]) for request in requests] == [2, 4]
    assert requests[1]["messages"][-1]["content"].startswith("Expected one of: [left]")
    assert (outcome.metrics["invalid"], outcome.success) == (2.0, False)


def test_an_episode_is_cut_at_its_calls() -> None:
    outcome, requests = play("gymnasium:CliffWalking-v1", lambda request: "[up]")
    assert len(requests) == 100
    assert (outcome.metrics["truncated"], outcome.success) == (1.0, False)


def test_a_named_opponent_plays_the_other_seat_and_held_out_games_are_against_chance() -> None:
    moves = iter(["[4]", "[0]", "[1]", "[7]", "[2]", "[6]", "[3]", "[5]", "[8]"])
    result, requests = play("textarena:TicTacToe-v0?opponent=rival", lambda request: next(moves))
    assert result.metrics["invalid_move"] == 0.0
    assert [request["model"] for request in requests[:4]] == ["local", "rival", "local", "rival"]
    (held_out,) = open_environment("textarena:TicTacToe-v0?opponent=rival").tasks("val", 1, 0)
    assert held_out["opponent"] == "random"


def test_a_random_opponent_makes_legal_moves() -> None:
    def answer(request: JSON) -> str:
        free = request["messages"][-1]["content"].rpartition("Available Moves: ")[2]
        return free.partition("'")[2].partition("'")[0]

    played = [play("textarena:TicTacToe-v0", answer, task)[0] for task in range(6)]
    assert {one.reward for one in played} <= {-1.0, 0.0, 1.0}
    assert not any(one.metrics["invalid_move"] for one in played)


def test_a_grid_is_described_from_the_agents_place() -> None:
    import gymnasium
    import minigrid  # noqa: F401

    game = gymnasium.make("MiniGrid-DoorKey-5x5-v0")
    seen, _ = game.reset(seed=0)
    told = describe_grid(seen)
    assert told.startswith("Mission: use the key to open the door and then get to the goal\nYou face ")
    assert "yellow key" in told or "yellow door" in told


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go east", "go east"),
        ("I think.\n\n> `take the key` \n", "take the key"),
        ("lo\0ok é", "look"),
        ("x" * 999, "x" * 200),
    ],
)
def test_a_text_command_is_the_last_line_of_a_reply(reply: str, command: str) -> None:
    assert text_command(Action(text=reply)).strip() == command


@pytest.mark.parametrize("reply", ["", " \n", "\0", "é"])
def test_a_reply_without_a_text_command_is_unreadable(reply: str) -> None:
    with pytest.raises(UnreadableActionError):
        text_command(Action(text=reply))


def test_the_model_of_a_check_streams_for_programs_that_want_it() -> None:
    async def answer(request: JSON) -> JSON:
        return tool_call(request, "guess", {"number": 3}) | {"content": "Three."}

    async def streamed() -> str:
        async with local_models() as model:
            chunks = (
                await model(answer)
                .async_openai()
                .chat.completions.create(model="local", messages=[{"role": "user", "content": "Guess."}], stream=True)
            )
            deltas = [chunk.choices[0].delta async for chunk in chunks if chunk.choices]
        calls = [use.function for delta in deltas for use in delta.tool_calls or []]
        return "".join(delta.content or "" for delta in deltas) + "".join(call.name + call.arguments for call in calls)

    assert asyncio.run(streamed()) == 'Three.guess{"number":3}'


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text() | st.integers() | st.booleans(), max_size=3
    )
)
def test_a_name_holds_its_options_whatever_they_are(options: dict[str, Any]) -> None:
    name = EnvironmentName.parse("textarena:Game-v0", options)
    assert EnvironmentName.parse(str(name)) == name


def test_seeds_of_splits_and_runs_never_meet() -> None:
    ranges = [seeds(split, 1_000_000, seed) for split in ("train", "val") for seed in (0, 1, 999)]
    assert len({one for each in ranges for one in (each[0], each[-1])}) == 12
    assert max(each[-1] for each in ranges) < 1 << 31


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("chess", "expected KIND:REST with one of gymnasium, .* or file.py:Class, got 'chess'"),
        ("reasoning-gym:chain_sums", "chain_sums"),
        ("reasoning-gym:chain_sum?min_digits=0", "reasoning-gym:chain_sum: "),
        ("gymnasium:FrozenLake-v1?slip=1", "slip"),
        ("gymnasium:Nothing-v0", "Nothing"),
        ("textarena:Wordle-v0", "its words are not here in NLTK's corpora"),
        ("textarena:Nothing-v0", "Nothing-v0"),
        ("nowhere.py:Class", "nowhere.py"),
    ],
)
def test_a_wrong_name_gets_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_environment(name)


def test_an_environment_that_another_installation_made_runs_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    link = environment_folder("scienceworld") / "lib/python3.11/site-packages/agentlightning"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "gone")
    install("scienceworld", print)
    assert link.resolve() == Path(agentlightning.__file__).parent
