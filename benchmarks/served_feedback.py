"""A served model learns from its users: success on a shifted mix of tasks before and after training from feedback.

A tiny model is trained on questions about cities and jobs, registered, promoted and served. 300 users then ask about pets
and bosses, each in a session of their own, and say whether they got the right answer. Training from that record, by the
documented commands alone, raises held-out success on the new mix; the control does the same with feedback by a coin. The
last line is JSON: {"before", "after", "control", "sessions", "wall_s"}, greedy and at temperature 1.

    python benchmarks/served_feedback.py --seed 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from openai import AsyncOpenAI

from agentlightning.demo import lookup, tasks
from agentlightning.demo.training import warm_start
from agentlightning.records import JSON
from agentlightning.runtime.children import listen
from agentlightning.trainer.progress import Silent

OLD, NEW = ("city", "job"), ("pet", "boss")
HELD_OUT = 200
CONCURRENCY = 24
TRAIN = """
[model]
path = "base"
name = "assistant"
[agent]
run = "agentlightning.demo.lookup:solve"
workers = 1
concurrency = 32
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
[engine]
device = "cpu"
"""
LEARN = """
[model]
path = "assistant@production"
[agent]
run = "agentlightning.demo.lookup:solve"
workers = 1
concurrency = 32
[data]
from_run = "{run}"
val = "new.jsonl"
[algorithm]
type = "rft"
held_out = 0.0
[trainer]
steps = {steps}
tasks_per_step = 32
learning_rate = 5e-4
seed = {seed}
[engine]
device = "cpu"
"""


class Commands:
    """The command line in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *words],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"agl {' '.join(words)} ended with {process.returncode}:\n{said}")
        return said


def mix(relations: tuple[str, ...], split: tasks.Split, count: int, seed: int) -> list[JSON]:
    """Task rows whose last question is about one of these relations."""
    rng = random.Random(f"{split} {relations} {seed}")
    found: list[JSON] = []
    while len(found) < count:
        row = lookup.sample(rng, split)
        if row["plan"]["relations"][-1] in relations:
            found.append(row)
    return found


async def use(address: str, key: str, questions: list[JSON], coin: random.Random | None) -> float:
    """Users who ask a question each and say whether the answer was right, or what a coin says; the success that they had."""
    right = 0.0
    turns = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=f"{address}/v1", headers={"authorization": f"Bearer {key}"}) as posts:

        async def ask(number: int, task: JSON) -> float:
            session = {"x-agl-session": f"user-{number}"}
            async with turns:
                llm = SimpleNamespace(model="assistant", base_url="", api_key="", http_client=None)
                async with AsyncOpenAI(base_url=f"{address}/v1", api_key=key, default_headers=session) as client:
                    success = await lookup.solve(task, llm, client)
                score = success if coin is None else float(coin.random() < 0.5)
                reply = await posts.post(f"/sessions/user-{number}/reward", json={"score": score})
                reply.raise_for_status()
                (await posts.post(f"/sessions/user-{number}/finish")).raise_for_status()
                return success

        for success in await asyncio.gather(*(ask(number, task) for number, task in enumerate(questions))):
            right += success
    return right / len(questions)


def serve(commands: Commands, questions: list[JSON], coin: random.Random | None, run_id: str) -> float:
    """Serve the model to users, and end the server."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    server = commands.start(
        *("serve", "--policy", "assistant@production"),
        *("--port", str(port), "--run", run_id),
    )
    assert server.stdout is not None
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("serving "):
                break
        else:
            raise SystemExit(f"the server ended:\n{''.join(said)}")
        address = f"http://127.0.0.1:{port}"
        key = commands.run("tokens", "create", "--role", "client", "--run", run_id, "--server", address).split()[-1]
        return asyncio.run(use(address, key, questions, coin))
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def learn(commands: Commands, run_id: str, steps: int, seed: int) -> list[JSON]:
    """Train from the record; the metrics of the run, by step."""
    (commands.folder / "learn.toml").write_text(LEARN.format(run=run_id, steps=steps, seed=seed))
    before = set((commands.folder / "runs").iterdir())
    commands.run("train", "learn.toml")
    [run] = [
        one for one in (commands.folder / "runs").iterdir() if one not in before and (one / "metrics.jsonl").exists()
    ]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()]


def success(rows: list[JSON], step: Any, kind: str) -> float:
    values = [row[f"eval/{kind}/reward_mean"] for row in rows if f"eval/{kind}/reward_mean" in row]
    return round(values[0 if step == 0 else -1], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--train-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="updates from the record")
    parser.add_argument("--folder", type=Path, help="work there, and leave it")
    given = parser.parse_args()
    started = time.time()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        commands = Commands(folder)
        say = partial(print, flush=True)
        if not (folder / "base").exists():
            say(f"warm start: {asyncio.run(warm_start('lookup', given.seed, folder / 'base', Silent()))}")
        for name, rows in (
            ("old", mix(OLD, "train", 32 * given.train_steps, given.seed)),
            ("new", mix(NEW, "test", HELD_OUT, 12345)),
        ):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "train.toml").write_text(TRAIN.format(steps=given.train_steps, seed=given.seed))
        commands.run("train", "train.toml")
        say(commands.run("models", "promote", f"assistant@{given.train_steps}", "production").strip())
        questions = mix(NEW, "train", given.sessions, given.seed)
        found: dict[str, list[JSON]] = {}
        for run_id, coin in (("served", None), ("control", random.Random(given.seed))):
            users = serve(commands, questions, coin, run_id)
            say(f"{run_id}: {given.sessions} sessions, {users:.2f} of them answered rightly")
            found[run_id] = learn(commands, run_id, given.steps, given.seed)
        kinds = ("greedy", "sampled")
        result = {
            "before": {kind: success(found["served"], 0, kind) for kind in kinds},
            "after": {kind: success(found["served"], -1, kind) for kind in kinds},
            "control": {kind: success(found["control"], -1, kind) for kind in kinds},
            "sessions": given.sessions,
            "wall_s": round(time.time() - started, 1),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
