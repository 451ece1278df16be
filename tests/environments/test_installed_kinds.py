"""Kinds that run in an environment of their own, which `agl env install` makes: ``make test-environments``.

The contract runs there too, with this Python's pytest version installed beside the package.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import orjson
import psutil
import pytest
from test_training import train

from agentlightning.environments.local_model import local_models
from agentlightning.environments.packages import install
from agentlightning.records import JSON
from agentlightning.testing.contract_model import write_contract_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

CONTRACTS = {
    "harbor:tasks?agent=parts.py:Writer&environment=parts.py:Processes": "hi",
    "textworld:?nb_rooms=2&quest_length=2&max_calls=4": "look",
    "tau2:mock?user=customer&max_steps=4": "Hello.",
    "scienceworld:find-animal,mendelian-genetics-known-plant?max_calls=6": "go to greenhouse",
}
"""A name of each kind, and what the model answers. Cheap ones: the contract plays 65 episodes."""
CUSTOMER = """
[policies.agent]
[policies.customer]
frozen = true
"""
PARTS = Path(__file__).with_name("harbor_parts.py")
HARBOR_TASK = {
    "instruction.md": "Write hi into hello.txt, for the {number}th time.",
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
    "tests/test.sh": 'if [ "$(cat hello.txt)" = hi ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n',
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n',
}
SUITE = """
import pytest
from agentlightning.testing.environment_contract import *

@pytest.fixture
def environment_name():
    return {name!r}

@pytest.fixture
def answers():
    return lambda request: {answer!r}
"""


def python_of(name: str) -> str:
    return str(install(name.partition(":")[0], print) / "bin" / "python")


def play(name: str, answer: Callable[[JSON], str | JSON], task: int = 0) -> tuple[JSON, list[JSON]]:
    """Outcome and requests of one training task, played by the kind's own Python."""
    requests = list[JSON]()

    async def reply(request: JSON) -> JSON:
        requests.append(request)
        given = answer(request)
        return {"role": "assistant", "content": given} if isinstance(given, str) else given

    async def played() -> tuple[bytes, bytes]:
        async with local_models() as model:
            process = await asyncio.create_subprocess_exec(
                *(python_of(name), "-m", "agentlightning.environments", name),
                *("--play", str(task), "--url", model(reply).base_url),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            return await process.communicate()

    output, errors = asyncio.run(played())
    assert output or errors
    return (orjson.loads(output.splitlines()[-1]) if b'"reward"' in output else {"error": errors.decode()}), requests


def turn(request: JSON) -> int:
    return sum(message["role"] == "assistant" for message in request["messages"])


@pytest.fixture(autouse=True)
def harbor_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tasks of Harbor in the folder in which each test runs, and what plays them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(PARTS, tmp_path / "parts.py")
    for number in range(10):
        for path, text in HARBOR_TASK.items():
            file = tmp_path / f"tasks/write-{number}/{path}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(number=number))


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_kind_keeps_the_contract_in_its_own_environment(name: str, tmp_path: Path) -> None:
    python = python_of(name)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"pytest=={version('pytest')}"], check=True)
    suite = tmp_path / "test_contract.py"
    suite.write_text(SUITE.format(name=name, answer=CONTRACTS[name]))
    command = [python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "5 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_kind_trains_two_steps_as_typed(name: str, tmp_path: Path) -> None:
    install(name.partition(":")[0], print)
    (tmp_path / "train.toml").write_text(CUSTOMER if name.startswith("tau2") else "")
    model = write_contract_model(tmp_path / "model", context=8192)
    rows = train(tmp_path, model, name, "train.toml")
    assert [row["rollout/failed"] for row in rows if row["kind"] == "step"] == [0, 0]
    assert all("eval/greedy/success_mean" in row for row in rows if row["kind"] == "eval/greedy")


TURTLE = """open door to outside; go to outside; look around; focus on egg turtle; pick up egg turtle;
open door to greenhouse; go to greenhouse; open door to hallway; go to hallway; open door to bedroom; go to bedroom;
move egg turtle egg in inventory to blue box"""


def test_a_solved_task_of_scienceworld_is_a_success_and_its_steps_add_up() -> None:
    path = [command.strip() for command in TURTLE.split(";")]
    outcome, requests = play("scienceworld:find-living-thing", lambda request: path[turn(request)], task=1)
    assert (outcome["reward"], outcome["success"]) == (1.0, True)
    assert len(outcome["steps"]) == len(requests) == len(path)


def test_a_task_of_scienceworld_that_is_failed_ends_and_pays_minus_one() -> None:
    outcome, requests = play("scienceworld:find-living-thing", lambda request: "Hm.\n> focus on air")
    assert (outcome["reward"], outcome["success"], len(requests)) == (-1.0, False, 1)


def test_a_jvm_that_dies_fails_the_episode_and_gives_no_reward() -> None:
    def answer(request: JSON) -> str:
        for child in psutil.Process().children(recursive=True):
            if child.name() == "java":
                child.send_signal(signal.SIGKILL)
        return "look around"

    outcome, _ = play("scienceworld:find-living-thing", answer)
    assert "scienceworld: its JVM: " in outcome["error"]


def test_no_reply_stops_a_game_of_textworld() -> None:
    replies = ["\0", "look", "restart", "look", "é" * 9, "look", "x" * 100_000, "save", "undo"]
    outcome, requests = play("textworld:?nb_rooms=1&quest_length=1", lambda request: replies[turn(request)])
    assert (len(requests), outcome["metrics"]["invalid"], outcome["success"]) == (9, 5.0, False)


def test_a_trial_of_harbor_pays_what_its_verifier_says() -> None:
    name = "harbor:tasks?agent=parts.py:Writer&environment=parts.py:Processes"
    outcomes = [play(name, lambda request, text=text: text)[0] for text in ("hi", "ho")]  # type: ignore[misc]
    assert [(outcome["reward"], outcome["success"]) for outcome in outcomes] == [(1.0, True), (0.0, False)]


def test_a_trial_of_harbor_whose_verifier_cannot_write_is_an_error() -> None:
    outcome, _ = play("harbor:tasks?agent=parts.py:Broken&environment=parts.py:Processes", lambda request: "hi")
    assert "env harbor: " in outcome["error"]


def test_a_trial_of_harbor_whose_container_cannot_start_is_an_error() -> None:
    outcome, requests = play("harbor:tasks?agent=terminus-2&environment=singularity", lambda request: "hi")
    assert "env harbor: write-" in outcome["error"]
    assert not requests


JUDGED = ("tau2:retail?user=customer", 19)
"""A training task whose only criterion is in words."""
CREATED_TASK = ("tau2:mock?user=customer", 0)
CREATED = {"user_id": "user_1", "title": "Important Meeting"}
CREATE_CALL = {"name": "create_task", "arguments": orjson.dumps(CREATED).decode()}
CREATE: JSON = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call-1", "type": "function", "function": CREATE_CALL}],
}


def served(request: JSON, **said: str | JSON) -> str | JSON:
    """The customer's request and goodbye, the agent's call and sentence, a judge's verdict: what is said instead, by who
    says it."""
    rules = str(request["messages"][0]["content"])
    if "expected outcomes" in rules:
        return f'{{"results": [{{"expectedOutcome": "", "reasoning": "", "metExpectation": {said.get("judge", "true")}}}]}}'
    if "playing the role of a customer" in rules:
        return said.get("customer", "###STOP###" if turn(request) else "A new task, please.")
    return "It is there." if request["messages"][-1]["role"] == "tool" else said.get("agent", CREATE)


@pytest.mark.parametrize(
    ("task", "said", "reward"),
    [
        (CREATED_TASK, {}, 1.0),
        (CREATED_TASK, {"agent": "No."}, 0.0),
        (JUDGED, {"agent": "Cotton."}, 1.0),
        (JUDGED, {"agent": "Cotton.", "judge": "false"}, 0.0),
    ],
    ids=["does it", "refuses", "pleases", "displeases"],
)
def test_an_agent_of_tau2_is_paid_for_what_it_did(task: tuple[str, int], said: JSON, reward: float) -> None:
    outcome, _ = play(task[0], lambda request: served(request, **said), task[1])
    assert (outcome["reward"], outcome["success"]) == (reward, reward == 1)
    assert outcome["metrics"]["truncated"] == 0


@pytest.mark.parametrize(
    ("said", "failure"),
    [({"customer": ""}, "tau2 could not play task"), ({"judge": "maybe"}, "tau2 could not judge task")],
)
def test_a_customer_or_judge_of_tau2_that_fails_gives_no_reward(said: JSON, failure: str) -> None:
    outcome, _ = play(JUDGED[0], lambda request: served(request, **said), JUDGED[1])
    assert failure in outcome["error"]


def test_an_empty_reply_ends_a_conversation_of_tau2_unpaid() -> None:
    outcome, _ = play("tau2:mock?user=customer", lambda request: served(request, agent=""))
    assert (outcome["reward"], outcome["metrics"]["invalid"]) == (0.0, 1.0)
