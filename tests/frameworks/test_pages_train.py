"""The agents of the pages behind a model that says nonsense, on the local engine; and the command of a page, as printed.

What a model says before it has learned anything must be a reward of 0 to an agent, not an exception: a page whose agent
falls over its own model could not be trained.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from apart import CODING, CONFLICTING, NODE, need_node, stand_apart
from command_line import Folder
from pages import EXAMPLES, FOLDER, page
from stage import open_stage_of
from tiny_policy import build_policy

from agentlightning.runtime.children import listen, start_child, stop_child
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow

IN_CI = ("langgraph",)
"""CI has the time for no more."""

NAMES = [
    pytest.param(path.stem, marks=() if path.stem in IN_CI else pytest.mark.long)
    for path in sorted([*FOLDER.glob("*.md"), *EXAMPLES.iterdir()], key=lambda path: path.stem)
    if path.stem not in CODING
]
SMALL = {
    "trainer.steps": 1,
    "trainer.tasks_per_step": 1,
    "algorithm.group_size": 2,
    "agent.workers": 1,
    "model.max_tokens": 12,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def sampler(policy: Path) -> Iterator[str]:
    """URL of the local engine's sampler with that model."""
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        descriptor = listener.fileno()
        arguments = ["agentlightning.engines.local.sampler", "--model", str(policy), "--fd", str(descriptor)]
        process = start_child(arguments, pass_fds=[descriptor])
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=100):  # the socket listens before the model is loaded
            pass
        yield url
    finally:
        stop_child(process, 10.0)


@pytest.mark.parametrize("name", NAMES)
async def test_nonsense_is_a_reward_of_zero(folder: Folder, policy: Path, sampler: str, name: str) -> None:
    prepare(folder, name)
    async with open_stage_of(folder, sampler, policy) as stage:
        played = await stage.play(page(name))
    assert (played.rollout.state, played.rollout.error) == ("succeeded", None)
    assert played.rollout.reward == 0.0
    assert played.calls
    assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in played.calls)


@pytest.mark.parametrize("name", ["openai-sdk", pytest.param("program", marks=pytest.mark.long)])
async def test_the_command_of_the_page_trains(folder: Folder, policy: Path, name: str) -> None:
    prepare(folder, name)
    page(name).write(folder.path)
    words = page(name).command
    words[words.index("--model") + 1] = str(policy)
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    store = f"sqlite:///{folder.path}/agl.db"

    training = folder.start(*words, *settings, "--store", store)
    out, err = await asyncio.to_thread(training.communicate, timeout=150)

    assert training.returncode == 0, out + err
    async with open_store(store) as opened:
        (run,) = await opened.runs()
        rollouts = await opened.rollouts(RolloutQuery(run_id=run.id, mode="train"))
    assert run.state == "finished"
    assert [(rollout.state, rollout.reward) for rollout in rollouts] == [("succeeded", 0.0)] * 2
    assert all(rollout.calls for rollout in rollouts)


def prepare(folder: Folder, name: str) -> None:
    """What the page has its reader install."""
    if name in NODE:
        need_node(folder.path, name)
    if name in CONFLICTING:
        stand_apart(folder.path, name)
