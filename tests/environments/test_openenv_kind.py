"""The kind openenv against two servers of the same games: one that speaks its wire, and OpenEnv's own in .venv-openenv."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import orjson
import pytest
from test_training import train

from agentlightning.environments.base import Environment, EpisodeResult, open_environment
from agentlightning.environments.checks import check_openings, check_outcome, tool_call
from agentlightning.environments.local_model import local_models
from agentlightning.errors import ConfigError, DataError, InfrastructureError
from agentlightning.records import JSON
from agentlightning.testing.contract_model import write_contract_model
from agentlightning.testing.environment_contract import *  # noqa: F403

HERE = Path(__file__).parent
OPENENV = HERE.parents[1] / ".venv-openenv" / "bin" / "python"
SERVERS = {"wire": (sys.executable, "openenv_wire.py"), "openenv": (str(OPENENV), "openenv_server.py")}
SMALL = 2
"""Sessions of the server under /small."""


@pytest.fixture(scope="module", params=["wire", pytest.param("openenv", marks=[pytest.mark.slow, pytest.mark.long])])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an environment without its path."""
    if not Path(SERVERS[request.param][0]).exists():
        pytest.skip("needs .venv-openenv: make test-environments installs it")
    with serving(request.param) as name:
        yield name


@contextmanager
def serving(kind: str) -> Iterator[str]:
    python, program = SERVERS[kind]
    with subprocess.Popen([python, HERE / program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"openenv:http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture(params=["guessing", "tools"])
def environment_name(request: pytest.FixtureRequest, server: str) -> str:
    return f"{server}/{request.param}"


def guess(request: JSON, number: object) -> JSON:
    return tool_call(request, request["tools"][0]["function"]["name"], {"number": number})


def guesses(request: JSON) -> int:
    """How many the model has made."""
    return len(request["messages"]) // 2


@pytest.fixture
def answers() -> Callable[[JSON], JSON]:
    return lambda request: guess(request, guesses(request))


@pytest.fixture
def at_once() -> int:
    return 16


def play(name: str, answer: Callable[[JSON], JSON], tasks: int = 1) -> tuple[list[EpisodeResult], list[JSON]]:
    """Results and requests of the first training tasks, all at once."""
    environment, requests = open_environment(name), list[JSON]()

    async def reply(request: JSON) -> JSON:
        requests.append(request)
        return answer(request)

    async def played() -> list[EpisodeResult | float]:
        async with local_models() as model:
            rows = environment.tasks("train", tasks, 0)
            return await asyncio.gather(*(environment.play(row, model(reply)) for row in rows))

    results = asyncio.run(played())
    return [one for one in results if isinstance(one, EpisodeResult)], requests


def text(content: object) -> JSON:
    return {"role": "assistant", "content": str(content)}


def test_an_action_is_the_tool_of_its_schema(server: str) -> None:
    _, requests = play(f"{server}/guessing?prompt=Guess.", lambda request: guess(request, 0))
    tool = requests[0]["tools"][0]["function"]
    assert (tool["name"], tool["description"]) == ("act", "Guess the number.")
    assert {key: tool["parameters"]["properties"]["number"][key] for key in ("type", "minimum")} == {
        "type": "integer",
        "minimum": 0,
    }
    assert "metadata" not in tool["parameters"]["properties"]
    assert requests[0]["messages"][0] == {"role": "system", "content": "Guess."}
    assert orjson.loads(requests[0]["messages"][1]["content"]) == {"hint": "below", "half": 4}


def test_tools_of_an_mcp_environment_are_the_models(server: str) -> None:
    _, requests = play(f"{server}/tools", lambda request: guess(request, 5))
    tool = requests[0]["tools"][0]["function"]
    assert (tool["name"], tool["description"]) == ("guess", "Guess the number.")
    assert tool["parameters"]["required"] == ["number"]
    assert requests[1]["messages"][-1]["role"] == "tool"
    assert requests[1]["messages"][-1]["content"] == "lower"


def test_each_step_has_its_reward_and_the_server_ends_the_episode(server: str, environment_name: str) -> None:
    results, _ = play(environment_name, lambda request: guess(request, guesses(request)), tasks=8)
    assert [[reward for _, reward in one.steps] for one in results[:3]] == [[1.0], [0.0, 1.0], [0.0, 0.0, 1.0]]
    assert [one.reward for one in results] == [1.0] * 4 + [0.0] * 4
    assert not any(one.metrics["truncated"] or one.metrics["unrewarded"] for one in results)


def test_an_action_that_the_schema_refuses_is_answered_with_the_reason(server: str) -> None:
    (result,), requests = play(f"{server}/guessing", lambda request: guess(request, "none"))
    assert (result.metrics["invalid"], result.reward) == (2.0, 0.0)
    assert requests[1]["messages"][-1]["content"].startswith("Invalid message: number: Input should be a valid integer")


def test_an_error_of_an_mcp_tool_is_shown_to_the_model(server: str) -> None:
    (result,), requests = play(f"{server}/tools?max_calls=2", lambda request: guess(request, "none"))
    assert (result.metrics["invalid"], result.metrics["truncated"], result.reward) == (0.0, 1.0, 0.0)
    assert "validation error" in requests[1]["messages"][-1]["content"]


def test_words_instead_of_a_tool_are_answered_with_its_name(server: str) -> None:
    (result,), requests = play(f"{server}/guessing", lambda request: text("three"))
    assert requests[1]["messages"][-1]["content"] == "Call one of the tools: act."
    assert result.metrics["invalid"] == 2.0


def test_words_after_tools_of_an_mcp_environment_end_the_episode(server: str) -> None:
    (result,), requests = play(
        f"{server}/tools", lambda request: text("done") if guesses(request) else guess(request, 7)
    )
    assert len(requests) == 2
    assert (result.reward, result.metrics["invalid"]) == (0.0, 0.0)


def test_episodes_wait_for_a_free_session(server: str) -> None:
    results, _ = play(f"{server}/small", lambda request: guess(request, guesses(request)), tasks=4 * SMALL)
    assert len(results) == 4 * SMALL


@asynccontextmanager
async def held_sessions(environment: Environment) -> AsyncIterator[None]:
    """All sessions of /small are taken, by episodes whose model does not answer."""
    release, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def think(request: JSON) -> JSON:
        asked.release()
        await release.wait()
        return guess(request, 0)

    async with local_models() as model:
        playing = [asyncio.ensure_future(environment.play({"seed": 0}, model(think))) for _ in range(SMALL)]
        for _ in playing:
            await asked.acquire()
        try:
            yield
        finally:
            release.set()
            await asyncio.gather(*playing)


def test_an_episode_fails_where_no_session_becomes_free_in_its_time(server: str) -> None:
    async def crowded() -> None:
        async with held_sessions(open_environment(f"{server}/small")), local_models() as model:
            impatient = open_environment(f"{server}/small?timeout_s=0.2")
            await impatient.play({"seed": 0}, model(unasked))

    with pytest.raises(InfrastructureError, match=r"no session became free in 0\.2 s .*agent\.concurrency"):
        asyncio.run(crowded())


async def unasked(request: JSON) -> JSON:
    raise AssertionError(request)


def test_a_server_that_turns_away_without_a_word_is_waited_for_too() -> None:
    with (
        serving("wire") as server,
        pytest.raises(InfrastructureError, match=r"no session became free in 0\.2 s \(it closed the connection\)"),
    ):
        play(f"{server}/curt?timeout_s=0.2", lambda request: guess(request, 0))


def test_a_step_that_fails_in_the_environment_is_no_reward_of_0(server: str) -> None:
    with pytest.raises(InfrastructureError, match="the disk is full"):
        play(f"{server}/broken", lambda request: guess(request, 0))


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_that_does_not_answer_ends_the_episode_at_its_time_limit(silent: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if silent:
            taken.listen()
        with pytest.raises(InfrastructureError, match="no OpenEnv server at http"):
            play(f"openenv:http://127.0.0.1:{taken.getsockname()[1]}?timeout_s=0.2", text)


def checked(check: Callable[[Environment, list[JSON]], Awaitable[list[str]]], name: str) -> list[str]:
    environment = open_environment(name)

    async def ran() -> list[str]:
        return await check(environment, list(environment.tasks("train", 2, 0)))

    return asyncio.run(ran())


def test_a_server_that_drops_the_seed_is_refused(server: str) -> None:
    with pytest.raises(DataError, match="the environment drops its seed"):
        checked(lambda environment, rows: check_openings(environment, rows, []), f"{server}/careless")


def test_a_server_that_never_gives_a_reward_is_noticed(server: str) -> None:
    warnings = checked(lambda environment, rows: check_outcome(environment, rows[0]), f"{server}/unrewarded")
    assert warnings == ["an episode ended without any reward, which counts as 0: give --reward if that is always so"]


@pytest.mark.slow
def test_it_trains_two_steps_as_typed(tmp_path: Path) -> None:
    model = write_contract_model(tmp_path / "model", context=4096)
    with serving("wire") as server:
        rows = train(tmp_path, model, f"{server}/guessing?prompt=Guess the number.")
    assert [row["rollout/failed"] for row in rows if row["kind"] == "step"] == [0, 0]


def test_an_address_without_its_scheme_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="expected the server's address, such as openenv:http://127"):
        open_environment("openenv:localhost:8000")
