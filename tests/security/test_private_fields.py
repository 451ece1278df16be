"""An agent that looks for the answer to its task: it has the question alone, and its reward function has both."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from attack_scene import DEADLINE_S, SERVER_KEY, Scene

from agentlightning.records import Fork, NewRollout
from agentlightning.store.base import RolloutQuery

ANSWER = "forty-two"
TASK = {"question": "6 x 7?", "answer": ANSWER, "hint": f"not {ANSWER}"}
LOOKS = """
import glob, os
print(open(os.environ["AGL_TASK"]).read(), dict(os.environ))
folder = os.path.dirname(os.environ["AGL_TASK"])
print([open(name).read() for name in glob.glob(folder + "/*") if os.path.isfile(name)])
"""
REWARD = 'def score(task, result):\n    return task["answer"] == "forty-two" and "6 x 7?" in result.output\n'


async def test_cat_agl_task_shows_no_private_field_in_a_rollout_or_in_its_fork(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "agent.py").write_text(LOOKS)
    table = {"data": {"train": "t.jsonl", "private": ["answer", "hint"]}}
    run = await scene.store.create_run("private", table)
    command = f"{sys.executable} -S {tmp_path}/agent.py"
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning.runner", "--server", scene.server.url, "--run", run.id),
        *("--command", command, "--reward", f"{tmp_path}/reward.py:score"),
        env={**os.environ, "AGL_SERVER_KEY": SERVER_KEY},
    )
    try:
        [first] = await scene.store.enqueue([NewRollout(run_id=run.id, task=TASK, group_id="g")])
        await scene.store.wait(run.id, at_least=1, timeout_s=DEADLINE_S)
        fork = Fork(rollout_id=first.id, attempt=1, calls=0, root_id=first.id)
        [second] = await scene.store.enqueue(
            [NewRollout(run_id=run.id, task=TASK, group_id="f", kind="fork", fork=fork)]
        )
        await scene.store.wait(run.id, after=1, at_least=1, timeout_s=DEADLINE_S)
    finally:
        worker.terminate()
        await worker.wait()
    ids = [first.id, second.id]
    rollouts = await scene.store.rollouts(RolloutQuery(ids=ids))
    assert [(one.state, one.reward, one.task, one.error) for one in rollouts] == [("succeeded", 1.0, TASK, None)] * 2
    for attempt in await scene.store.attempts(ids):
        assert "6 x 7?" in str(attempt.output)
        assert ANSWER not in str(attempt.output)
