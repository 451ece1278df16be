"""A server whose model is scripted, and workers as processes that run the agent of a page: all is real but the model."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from command_line import Folder
from pages import Page
from scripted_engine import ScriptedEngine
from sdk_house import TEMPLATE
from toy_model import write_tokenizer

import build
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import JSON, Call, NewRollout, Rollout, Sampling
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.client import LightningStoreClient

KEY = "key-of-the-tests"
END = 2
STARTED_S = 150.0
"""A framework's import alone takes up to half a minute where others keep the processor busy."""

MAX_TOKENS = 100
"""Longer than anything that is scripted."""

Speaker = Callable[[str, str], str]
"""Role and text of the last message to what the model says."""


def tool_call(tool: str, **arguments: object) -> str:
    """A call of a tool in the words of the model."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Played:
    """What became of one task: the rollout, and what was recorded of its last attempt."""

    rollout: Rollout
    calls: list[Call]

    @property
    def messages(self) -> list[JSON]:
        """Every message that some prompt added, in order."""
        return [message for call in self.calls for message in call.messages]

    def check(self, *continuations: str) -> None:
        """It succeeded with reward 1, and its calls have their tokens and follow from each other as given."""
        assert (self.rollout.state, self.rollout.error) == ("succeeded", None)
        assert (self.rollout.reward, self.rollout.warning) == (1.0, None)
        assert [call.continuation for call in self.calls] == list(continuations)
        for call in self.calls:
            assert call.policy == "default"
            assert len(call.sampled_ids) == len(call.logprobs) > 0
            assert call.prompt_tokens > 0
            assert call.finish_reason in ("stop", "tool_calls")


class Stage:
    """Plays the agents of pages."""

    def __init__(self, url: str, store: LightningStoreClient, run_id: str, folder: Folder) -> None:
        self.folder = folder
        self._url = url
        self._store = store
        self._run_id = run_id

    async def play(self, page: Page, changed: Mapping[str, str] | None = None) -> Played:
        """The page's first task, by a worker in the folder into which the page was written, but for files in `changed`."""
        page.write(self.folder.path, changed)
        task = json.loads(page.files["tasks.jsonl"].splitlines()[0])
        (queued,) = await self._store.enqueue(
            [NewRollout(run_id=self._run_id, task=task, group_id="0", sampling=Sampling(max_tokens=MAX_TOKENS))]
        )
        agent = page.option("--agent")
        assert agent is not None
        reward = page.option("--reward")
        worker = self.folder.start(
            *("worker", agent, "--server", self._url, "--run", self._run_id),
            *(("--reward", reward) if reward else ()),
            env={"AGL_SERVER_KEY": KEY, "HOME": str(self.folder.path)},  # some frameworks write settings of their own
        )
        finished = await self._store.wait(self._run_id, timeout_s=STARTED_S)
        worker.send_signal(signal.SIGINT)
        _, err = await asyncio.to_thread(worker.communicate, timeout=STARTED_S)
        calls = await self._store.calls([queued.id])
        assert finished, f"the agent did not end within {STARTED_S:.0f} s, after {len(calls)} calls\n{err}"
        assert worker.returncode == 0, err
        return Played(finished[0], calls)


@asynccontextmanager
async def open_stage(folder: Folder, speaker: Speaker) -> AsyncIterator[Stage]:
    """A stage with one run, whose model says what `speaker` makes of the last message of the prompt."""
    tokenizer = await asyncio.to_thread(write_tokenizer, folder.path / "tokenizer", TEMPLATE)
    renderer = Renderer(tokenizer)

    def answers(request: JSON) -> list[int]:
        prompt = renderer.decode(request["token_ids"], special=True)
        role, _, text = prompt.rsplit("<|im_start|>", 2)[-2].removesuffix("<|im_end|>\n").partition("\n")
        return [*renderer.encode(speaker(role, text)), END]

    engine = await ScriptedEngine(answers, tokenizer=tokenizer).start()
    try:
        async with open_stage_of(folder, engine.url, tokenizer) as stage:
            yield stage
    finally:
        await engine.close()


@asynccontextmanager
async def open_stage_of(folder: Folder, engine: str, tokenizer: Path) -> AsyncIterator[Stage]:
    """A stage with one run, whose model an engine at this URL serves."""
    with AgentLightningServer("memory://", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as store:
            run = await store.create_run("pages", {})
            await store.put_resources([build.policy(run.id, engine, tokenizer)])
            yield Stage(server.url, store, run.id, folder)
