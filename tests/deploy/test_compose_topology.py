"""The services of a generated compose.yaml run, are restarted in turn while rollouts go on, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import orjson
import postgres_server
import pytest
from command_line import Folder
from composition import Composition, metric

from agentlightning.demo import tiny_model
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long]

DEADLINE_S = 250.0
"""Matters only where the test fails: the slowest machine has its time."""

RUN = "bot"
STEPS, TASKS, GROUP = 6, 4, 4
WORDS = ("one", "two", "three", "four")
CONFIG = f"""
[model]
path = "model"
max_tokens = 4
[agent]
run = "agent.py:solve"
workers = 2
concurrency = 8
[data]
train = "train.jsonl"
[algorithm]
group_size = {GROUP}
[trainer]
steps = {STEPS}
tasks_per_step = {TASKS}
checkpoint_every = 2
[engine]
device = "cpu"
"""
AGENT = """
import asyncio
from pathlib import Path

from openai import AsyncOpenAI

from agentlightning.runner.attempt import CURRENT


async def solve(task, llm):
    step = CURRENT.get().claim.rollout.step
    while Path("hold").exists() and step > int(Path("hold").read_text() or 0):
        await asyncio.sleep(0.02)
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client, max_retries=100)
    messages = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model=llm.model, messages=messages)
    return float(len(reply.choices[0].message.content or ""))
"""
WORKERS = ("worker-1", "worker-2")


@pytest.fixture(scope="module")
def postgres() -> Iterator[postgres_server.PostgresServer]:
    if reason := postgres_server.missing():
        pytest.skip(reason)
    with postgres_server.PostgresServer() as server:
        yield server


@pytest.fixture
def composition(tmp_path: Path, postgres: postgres_server.PostgresServer) -> Iterator[Composition]:
    project = tmp_path / RUN
    project.mkdir()
    tiny_model.build(project / "model", WORDS, hidden=32, layers=1, context=64)
    (project / "agent.py").write_text(AGENT)
    (project / "train.toml").write_text(CONFIG)
    (project / "train.jsonl").write_bytes(b"".join(orjson.dumps({"question": word}) + b"\n" for word in WORDS))
    written = project / "deploy"
    done = Folder(project).run("deploy", "compose", "train.toml", "--to", "deploy")
    assert done.returncode == 0, done.stderr
    made = Composition(written, postgres.url())
    try:
        yield made
    finally:
        made.close()


async def test_every_service_is_restarted_while_rollouts_go_on_and_nothing_is_lost(
    composition: Composition, postgres: postgres_server.PostgresServer
) -> None:
    hold = composition.project.path / "hold"
    hold.write_text("0")
    composition.start("server")
    composition.until(lambda: answers(f"{composition.url}/readyz"), "the server answers")
    assert composition.token("TRAINER_TOKEN", "trainer")
    assert composition.token("READER_TOKEN", "reader")
    composition.start("trainer")
    composition.until(lambda: composition.token("WORKER_TOKEN", "worker", "--run", RUN), "the run is there")
    console = f"http://127.0.0.1:{composition.ports['7860']}"
    for name in WORKERS:
        composition.start("worker", name)
    composition.start("console")
    composition.until(
        lambda: asks_for_key(console, composition.secrets["READER_TOKEN"]), "the console asks for its key"
    )

    async with LookedAt(composition, hold) as run:
        restarts: list[Callable[[], object]] = [
            lambda: composition.restart("worker", WORKERS[0], kill=True),
            lambda: composition.restart("server"),
            lambda: (postgres.kill(), postgres.start()),
            lambda: composition.restart("trainer", kill=True),
            lambda: composition.restart("console"),
        ]
        for step, restart in enumerate(restarts, 1):
            await run.holds_rollouts_of(step)
            await asyncio.to_thread(restart)
        hold.unlink()
        await asyncio.to_thread(composition.restart, "worker", WORKERS[1])  # drains: its agents end by themselves
        await run.ends()
        await run.check()
    composition.until(lambda: asks_for_key(console, composition.secrets["READER_TOKEN"]), "the console is back")
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        shown = await client.get(f"http://127.0.0.1:{composition.ports['8089']}/metrics")
    assert metric(shown.text, "agl_store_up") == {"agl_store_up": 1}


class LookedAt:
    """The run, as its database shows it."""

    def __init__(self, composition: Composition, hold: Path) -> None:
        self._composition = composition
        self._hold = hold
        self._store: LightningStore = open_store(composition.environment("server")["AGL_STORE"])

    async def __aenter__(self) -> LookedAt:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._store.__aexit__(*exception)  # type: ignore[arg-type]

    async def holds_rollouts_of(self, step: int) -> None:
        """Wait until a step's rollouts run, and agents hold them."""
        waiting = self._hold.with_name("hold.new")
        waiting.write_text(str(step - 1))  # agents of this step's rollouts, and of later ones, wait
        waiting.replace(self._hold)

        async def there() -> bool:
            held = await self._store.rollouts(RolloutQuery(run_id=RUN, mode="train", step=step))
            return sum(rollout.state == "running" for rollout in held) > 0

        await self._until(there, f"rollouts of step {step} run")

    async def ends(self) -> None:
        """Wait until the trainer has ended, and see that it succeeded."""
        trainer = self._composition.running["trainer"]
        code = await asyncio.to_thread(trainer.wait, DEADLINE_S)
        assert code == 0, self._composition.log("trainer")[-3000:]

    async def check(self) -> None:
        """Every step was learned once, from rollouts that nobody else consumed, and none failed."""
        (run,) = await self._store.runs()
        assert (run.id, run.state) == (RUN, "finished")
        steps = await self._store.steps(RUN)
        assert [(step.step, step.state) for step in steps] == [(step, "closed") for step in range(1, STEPS + 1)]
        rollouts = await self._store.rollouts(RolloutQuery(run_id=RUN, mode="train"))
        assert Counter(rollout.state for rollout in rollouts) == {"succeeded": STEPS * TASKS * GROUP}
        consumed = [each.rollout_id for step in steps for each in step.consumed]
        assert sorted(consumed) == sorted(rollout.id for rollout in rollouts)
        attempts = await self._store.attempts([rollout.id for rollout in rollouts])
        assert {attempt.state for attempt in attempts} <= {"succeeded", "lost"}

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not await condition():
            if asyncio.get_running_loop().time() > end:
                pytest.fail(self._told(what))
            await asyncio.sleep(0.05)

    def _told(self, what: str) -> str:
        names = self._composition.running
        return f"{what}: not in time\n" + "\n".join(
            f"--- {name}\n{self._composition.log(name)[-1500:]}" for name in names
        )


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def asks_for_key(console: str, key: str) -> bool:
    """True where the console answers, shows nothing without its key, and something with it."""
    try:
        without = httpx.get(console, trust_env=False, timeout=10)
        given = httpx.get(console, trust_env=False, timeout=10, headers={"Authorization": f"Bearer {key}"})
    except httpx.TransportError:
        return False
    return without.status_code in (401, 403, 303) and given.status_code == 200
