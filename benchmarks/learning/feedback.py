"""A served model learns from its users: success on a shifted mix of tasks before and after training from feedback.

A tiny model is trained on questions about cities and jobs, registered, promoted and served. Users then ask about pets and
bosses, each in a session of their own, and say whether the answer was right (arm `feedback`), or what a coin says (`coin`).
Then it is trained from that record, by the documented commands alone.
Figures: served, the users' success; before_sampled and after_sampled, at temperature 1.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import httpx
from claim import AGL, HELD_OUT, HELD_OUT_SEED, Cell, Claim, Outcome, curve, execute, train, warm_start, write_rows
from openai import AsyncOpenAI

from agentlightning.demo import lookup, tasks
from agentlightning.records import JSON
from agentlightning.runtime.children import listen

OLD, NEW = ("city", "job"), ("pet", "boss")
SESSIONS, TRAIN_STEPS, UPDATES, CONCURRENCY = 300, 2, 40, 24
START_S = 600.0
AGENT = """
[agent]
run = "agentlightning.demo.lookup:solve"
workers = 1
concurrency = 32
[engine]
device = "cpu"
"""
TRAIN = """
[model]
path = "{model}"
name = "assistant"
[data]
train = "old.jsonl"
[algorithm]
group_size = 8
minibatches = 4
[trainer]
steps = {steps}
tasks_per_step = 32
learning_rate = 1e-3
seed = {seed}
"""
LEARN = """
[model]
path = "assistant@production"
[data]
from_run = "served"
val = "new.jsonl"
[algorithm]
type = "rft"
held_out = 0.0
[trainer]
steps = {steps}
tasks_per_step = 32
learning_rate = 5e-4
seed = {seed}
"""


def mix(relations: tuple[str, ...], split: tasks.Split, count: int, seed: int) -> list[JSON]:
    """Task rows whose last question is about one of these relations."""
    rng = random.Random(f"{split} {relations} {seed}")
    found: list[JSON] = []
    while len(found) < count:
        row = lookup.sample(rng, split)
        if row["plan"]["relations"][-1] in relations:
            found.append(row)
    return found


def prepare(cell: Cell) -> None:
    """The model that is served: its store and its runs are copied for each arm."""
    warm_start(cell, "lookup")
    write_rows(cell.folder / "old.jsonl", mix(OLD, "train", 32 * TRAIN_STEPS, cell.seed))
    config = cell.folder / "train.toml"
    config.write_text(TRAIN.format(model=cell.model, steps=TRAIN_STEPS, seed=cell.seed) + AGENT)
    first = Cell(cell.claim, "served", cell.seed, cell.folder)
    train(first, config, {})
    place = ("--store", f"sqlite:///{first.place}/agl.db")
    execute(cell, "promote", *AGL, "models", "promote", f"assistant@{TRAIN_STEPS}", "production", *place)


def measure(cell: Cell) -> Outcome:
    sessions, updates = (24, 2) if cell.quick else (SESSIONS, UPDATES)
    for path in (cell.folder / "served").glob("agl.db*"):
        shutil.copyfile(path, cell.place / path.name.replace("agl", "own"))
    questions = mix(NEW, "train", sessions, cell.seed)
    served = serve(cell, questions, random.Random(cell.seed) if cell.arm == "coin" else None)
    write_rows(cell.place / "new.jsonl", mix(NEW, "test", HELD_OUT, HELD_OUT_SEED))
    config = cell.place / "learn.toml"
    config.write_text(LEARN.format(steps=updates, seed=cell.seed) + AGENT)
    _, rows = train(cell, config, {}, store=f"sqlite:///{cell.place}/own.db")
    sampled = [row["eval/sampled/reward_mean"] for row in rows if "eval/sampled/reward_mean" in row]
    return Outcome(curve(rows), {"served": served, "before_sampled": sampled[0], "after_sampled": sampled[-1]})


def serve(cell: Cell, questions: list[JSON], coin: random.Random | None) -> float:
    """Serves the model to its users; returns their success."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    log, address = cell.place / "serve.log", f"http://127.0.0.1:{port}"
    words = ("serve", "--policy", "assistant@production", "--port", str(port), "--run", "served")
    with log.open("w") as output:
        store = f"sqlite:///{cell.place}/own.db"
        words += ("--store", store, "--runs", str(cell.place / "served"))
        server = subprocess.Popen([*AGL, *words], stdout=output, stderr=output, cwd=cell.place)
    try:
        deadline = time.monotonic() + START_S
        while not any(line.startswith("serving ") for line in log.read_text().splitlines()):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not serve: {log.read_text()}")
            time.sleep(0.1)
        token = ("tokens", "create", "--role", "client", "--run", "served", "--server", address)
        key = subprocess.run(
            [*AGL, *token], cwd=cell.place, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.split()
        return asyncio.run(use(address, key[-1], questions, coin))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def use(address: str, key: str, questions: list[JSON], coin: random.Random | None) -> float:
    """Users who ask a question each and rate the answer; returns the share of right answers."""
    turns = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=f"{address}/v1", headers={"authorization": f"Bearer {key}"}) as posts:

        async def ask(number: int, task: JSON) -> float:
            session = {"x-agl-session": f"user-{number}"}
            llm = SimpleNamespace(model="assistant", base_url="", api_key="", http_client=None)
            async with turns, AsyncOpenAI(base_url=f"{address}/v1", api_key=key, default_headers=session) as client:
                success = await lookup.solve(task, llm, client)
                score = success if coin is None else float(coin.random() < 0.5)
                (await posts.post(f"/sessions/user-{number}/reward", json={"score": score})).raise_for_status()
                (await posts.post(f"/sessions/user-{number}/finish")).raise_for_status()
                return success

        return sum(await asyncio.gather(*(ask(number, task) for number, task in enumerate(questions)))) / len(questions)


CLAIMS = {"feedback": Claim(arms=("coin", "feedback"), measure=measure, prepare=prepare, seeds=1)}
