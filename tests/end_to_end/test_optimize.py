"""``agl optimize`` as a person uses it: over a hosted model, ended by Ctrl-C, killed, resumed, and its result promoted.

Real processes and signals; the hosted model is a double on loopback that reads the words of its prompt. A signal comes when
the model was asked for a new text, never after a time.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_double import chat_double
from command_line import DEADLINE_S, Folder, refused_at_once, until
from typer.testing import Result

from agentlightning.records import Attempt, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow

WORDS = ("hurry", "verify", "guess", "cite")
GOOD = ("verify", "cite")
AGENT = """
async def solve(task, llm):
    system = llm.prompt("system")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task["question"]}]
    reply = await llm.async_openai().chat.completions.create(model=llm.model, messages=messages)
    done = reply.choices[0].message.content.split()
    missing = [word for word in ("verify", "cite") if word not in done]
    return {"score": 1 - len(missing) / 2, "feedback": " ".join(missing)}
"""
SETTINGS = """
[model]
path = "external:hosted"
[external.hosted]
url = "{url}"
models = ["agent-1"]
[external.writer]
url = "{url}"
models = ["writer-1"]
max_retries = 0
[agent]
run = "agent.py:solve"
workers = 1
[data]
train = "train.jsonl"
val = "val.jsonl"
[prompts.templates]
system = "Answer."
[algorithm]
type = "apo"
minibatch = 2
[optimize]
model = "writer"
max_rollouts = 300
"""


@dataclass
class Hosted:
    """A hosted model. As an agent's it says the words of its system prompt; as a writer it adds the next word."""

    asked: list[str] = field(default_factory=list)
    """Requests to write."""
    url: str = ""

    def answer(self, request: dict[str, Any]) -> str:
        text: str = request["messages"][0]["content"]
        if request["model"] == "agent-1":
            return text.replace(".", "")
        self.asked.append(text)
        if "```" not in text.rpartition("Answer with")[2]:
            return "It lacks something."
        current = text.split("```\n")[1].strip()
        missing = [word for word in WORDS if word not in current.split()]
        return f"```\n{current} {missing[len(self.asked) // 2 % len(missing)]}\n```"


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    model = Hosted()
    with chat_double(model.answer) as url:
        model.url = f"{url}/v1"
        yield model


@pytest.fixture
def prepared(folder: Folder, hosted: Hosted) -> Folder:
    folder.write("agent.py", AGENT)
    folder.write("optimize.toml", SETTINGS.format(url=hosted.url))
    for split, count in (("train", 6), ("val", 8)):
        folder.write(f"{split}.jsonl", "".join(json.dumps({"question": f"{split} {n}"}) + "\n" for n in range(count)))
    return folder


def started(folder: Folder, *arguments: str) -> subprocess.Popen[str]:
    with (folder.path / "out.txt").open("a") as out:
        return folder.start("optimize", *arguments, stdout=out, stderr=subprocess.STDOUT)


def output(folder: Folder) -> str:
    return (folder.path / "out.txt").read_text()


def only_run(folder: Folder) -> str:
    [run] = [each.name for each in (folder.path / "runs").iterdir() if each.is_dir()]
    return run


def stored(folder: Folder, run: str) -> tuple[list[Rollout], list[Attempt]]:
    async def read() -> tuple[list[Rollout], list[Attempt]]:
        async with open_store(f"sqlite:///{folder.path}/runs/agl.db") as store:
            rollouts = await store.rollouts(RolloutQuery(run_id=run))
            return rollouts, await store.attempts([each.id for each in rollouts])

    return asyncio.run(read())


def test_a_search_that_is_stopped_and_killed_goes_on_and_pays_nothing_twice(prepared: Folder, hosted: Hosted) -> None:
    process = started(prepared, "optimize.toml")
    until(lambda: len(hosted.asked) >= 2 or process.poll() is not None, "the model was asked")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0, output(prepared)
    run = only_run(prepared)
    assert f"go on with: agl optimize --resume {run}" in output(prepared)
    listed = prepared.run("runs", "list").stdout
    assert "interrupted" in listed

    for _ in range(2):
        before = len(hosted.asked)
        process = started(prepared, "--resume", run)
        until(lambda: len(hosted.asked) > before or process.poll() is not None, "the model was asked")  # noqa: B023
        process.kill()
        process.wait()
    process = started(prepared, "--resume", run, "--json")
    assert process.wait(DEADLINE_S) == 0, output(prepared)
    result = json.loads(output(prepared).splitlines()[-1])
    assert (result["finished"], result["before"], result["after"]) == (True, 0.0, 1.0)
    assert all(word in result["texts"]["system"] for word in GOOD)

    rollouts, attempts = stored(prepared, run)
    assert len(rollouts) == result["rollouts"]
    assert len([one for one in attempts if one.state == "succeeded"]) == len(rollouts)
    asked, _ = stored(prepared, f"{run}-optimizer")
    answered = [one for one in asked if one.calls or one.state == "succeeded"]
    assert len({one.task["prompt"] for one in answered}) == len({one.group_id.rpartition(":")[0] for one in answered})
    assert len(hosted.asked) <= len(answered) + 4  # the two that were under way side by side at each kill

    candidates = json.loads(prepared.run("prompts", "list", run, "--candidates", "--json").stdout)
    best = next(each for each in candidates if each["number"] == result["best"])
    assert (set(best["rewards"].values()), best["versions"].keys()) == ({1.0}, {"system"})
    newest = json.loads(prepared.run("prompts", "show", run, "system", "--json").stdout)
    assert newest["value"]["template"] == result["texts"]["system"]


@pytest.mark.long
def test_without_promotion_rollouts_keep_the_prompts_that_the_search_started_from(
    prepared: Folder, hosted: Hosted
) -> None:
    done = prepared.run("optimize", "optimize.toml", "--no-promote", "--set", "optimize.max_rollouts=40")
    assert done.returncode == 0, done.stderr + done.stdout
    newest = json.loads(prepared.run("prompts", "show", only_run(prepared), "system", "--json").stdout)
    assert newest["value"]["template"] == "Answer."
    assert "The budget of 40 rollouts is spent" in done.stdout or "earns 1 on every validation task" in done.stdout


def test_a_model_that_is_away_ends_the_search_in_a_sentence_that_says_how_to_go_on(prepared: Folder) -> None:
    settings = (prepared.path / "optimize.toml").read_text()
    here, _, writer = settings.rpartition("url = ")
    prepared.write("optimize.toml", f'{here}url = "http://127.0.0.1:9/v1"{writer[writer.index(chr(10)) :]}')
    done = prepared.run("optimize", "optimize.toml")
    assert done.returncode == 1
    assert "error: optimize.model: writer-1 gives no answer: 502" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert f"go on with: agl optimize --resume {only_run(prepared)}" in done.stdout


def test_mistakes_of_the_configuration_are_one_sentence(prepared: Folder, invoke: Callable[..., Result]) -> None:
    few = ("optimize.toml", "--set", "optimize.max_rollouts=5")
    nobody = ("optimize.toml", "--set", "optimize.model=nobody.py:write")
    refused_at_once(invoke("optimize", *few), "optimize.max_rollouts: expected at least 8")
    refused_at_once(invoke("optimize", *nobody), "nobody.py")
    refused_at_once(invoke("optimize"), "give a TOML file, or --resume RUN")
    assert not list((prepared.path / "runs").glob("*/config.json"))
