"""Canaries behind real gateways: is a version that is worse by .15 rolled back, and one that is equal left alone?

Two gateways (`agl serve`, and one more in front of its store) serve two versions of a model. The engines are static but for
their success: each answers "right" with its version's probability, else "wrong". A user's session is a call, for one in four
a second one, and a score of 1 where its first answer was right. The controller of canaries runs as it does in
`agl serve --policy`. For each trial a canary gets a share of the sessions until the controller decides, and a second more:

    detected        trials of a version that is worse by .15, at .9, .75 and .5, in which it was rolled back
    false_alarms    trials of an equal version in which it was rolled back
    sessions_until  the canary's sessions until the roll-back, median of the trials
    rollback_s      seconds from the result with which the rule fires until no gateway gives the canary to a new session, the
                    longest of all trials
    failed_calls    calls and scores that were not answered with 200
    mixed_sessions  sessions with answers of two versions

    python benchmarks/canary.py [--trials 20] [--weight 0.3] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer

from agentlightning.config.canary import CanaryConfig
from agentlightning.config.serve import RoutesConfig
from agentlightning.records import JSON, Resource
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import KEY_VARIABLE
from agentlightning.trainer.canary.controller import CanaryController, put_routes
from static_engine import write_tokenizer

KEY = "sk-agl-server-of-the-benchmark"
MODEL = "support"
STABLE, CANARY = 1, 2
RULE = CanaryConfig(reward_margin=0.1, error_margin=None, max_sessions=600)
WORSE_BY = 0.15
SUCCESS = (0.9, 0.75, 0.5)
"""Of the stable version, in turn."""
USERS = 16
AFTER_S = 1.0
"""Seconds of sessions after a decision."""
MAX_SESSIONS = 20_000
START_S = 120.0


@dataclass
class StaticEngine:
    """Serves one version: "VERSION right" with its probability of success, else "VERSION wrong"."""

    version: int
    tokenizer: Tokenizer
    success: float = 1.0
    draw: random.Random = field(default_factory=random.Random)

    async def generate(self, http: web.Request) -> web.Response:
        await http.read()
        word = "right" if self.draw.random() < self.success else "wrong"
        ids = [*self.tokenizer.encode(f"{self.version} {word}").ids, self.tokenizer.token_to_id("<|im_end|>")]
        content = [{"token": f"token_id:{one}", "logprob": -0.1, "bytes": [], "top_logprobs": []} for one in ids]
        choice = {"index": 0, "finish_reason": "stop", "stop_reason": None}
        whole = {**choice, "logprobs": {"content": content}, "token_ids": ids}
        return web.json_response({"request_id": "static", "prompt_logprobs": None, "choices": [whole]})


@dataclass
class Trial:
    """One canary, and what its sessions saw."""

    number: int
    success: dict[int, float]
    decisions: list[JSON] = field(default_factory=list)
    starts: list[tuple[float, int]] = field(default_factory=list)
    """When each session's first call was sent, in seconds since the epoch, and the version that answered."""
    failed: int = 0
    mixed: int = 0

    @property
    def worse(self) -> bool:
        return self.success[CANARY] < self.success[STABLE]

    def figures(self) -> JSON:
        decision = self.decisions[0] if self.decisions else {}
        until_s = decision.get("decided_ns", 0) / 1e9
        canary = [start for start, version in self.starts if version == CANARY]
        late = [start - until_s for start in canary if start > until_s]
        rolled_back = decision.get("decision") == "roll_back"
        return {
            "stable": self.success[STABLE],
            "canary": round(self.success[CANARY], 2),
            "decision": decision.get("decision", "none"),
            "sessions": sum(start <= until_s for start, _ in self.starts),
            "canary_sessions": sum(start <= until_s for start in canary),
            "rollback_s": round(max([decision["put_s"], *late]), 3) if rolled_back else None,
            "put_s": round(decision.get("put_s", 0.0), 3),
            "failed_calls": self.failed,
            "mixed_sessions": self.mixed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--weight", type=float, default=0.3, help="share of the canary")
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs: two trials of each kind")
    given = parser.parse_args()
    trials = 2 if given.quick else given.trials
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), trials, given.weight))
    print(json.dumps(figures))


async def measure(folder: Path, trials: int, weight: float) -> JSON:
    """All trials, one after the other."""
    tokenizer_folder = write_tokenizer(folder / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    engines = {version: StaticEngine(version, tokenizer) for version in (STABLE, CANARY)}
    found = []
    async with AsyncExitStack() as stack:
        urls = {version: await serve(engine, stack) for version, engine in engines.items()}
        gateways = await start_gateways(folder, stack)
        store = await stack.enter_async_context(LightningStoreClient(gateways[0], KEY))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for number in range(2 * trials):
            stable = SUCCESS[number // 2 % len(SUCCESS)]
            success = {STABLE: stable, CANARY: stable - WORSE_BY * (number % 2 == 0)}
            trial = Trial(number, success)
            for version, engine in engines.items():
                engine.success, engine.draw = success[version], random.Random(1000 * number + version)
            scene = Scene(store, session, gateways, trial, weight)
            await scene.run(urls, tokenizer_folder)
            found.append(trial.figures())
            print(" ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    return summary(found)


def summary(found: list[JSON]) -> JSON:
    """The last line."""
    worse = [one for one in found if one["canary"] < one["stable"]]
    equal = [one for one in found if one["canary"] == one["stable"]]
    rolled = [one for one in worse if one["decision"] == "roll_back"]
    return {
        "detected": len(rolled),
        "false_alarms": sum(one["decision"] == "roll_back" for one in equal),
        "sessions_until": statistics.median(one["canary_sessions"] for one in rolled) if rolled else None,
        "rollback_s": max((one["rollback_s"] for one in rolled), default=None),
        "failed_calls": sum(one["failed_calls"] for one in found),
        "mixed_sessions": sum(one["mixed_sessions"] for one in found),
        "trials": len(worse),
        "promoted": sum(one["decision"] == "promote" for one in equal),
        "measured": found,
    }


@dataclass
class Scene:
    """The users of one trial."""

    store: LightningStoreClient
    session: aiohttp.ClientSession
    gateways: list[str]
    trial: Trial
    weight: float

    async def run(self, urls: dict[int, str], tokenizer: Path) -> None:
        store, trial = self.store, self.trial
        run = await store.create_run(f"serve {MODEL}", {"serve": {"model": MODEL}, "model": {}})
        for version, url in urls.items():
            value = {"model": MODEL, "endpoints": [url], "tokenizer": str(tokenizer), "seed": 7, "api": "generate"}
            await store.put_resources([Resource(run_id=run.id, name=f"{MODEL}-{version}", kind="policy", value=value)])
        await put_routes(store, run.id, RoutesConfig(stable=STABLE, canary=CANARY, weight=self.weight, rule=RULE))
        secret = (await store.create_token("app", "client", run.id)).secret

        def decided(decision: JSON) -> None:
            trial.decisions.append({**decision, "put_s": time.time() - decision["decided_ns"] / 1e9})

        controller = asyncio.create_task(CanaryController(store, run.id, MODEL, alias=None, on_decision=decided).run())
        await asyncio.gather(*(self._user(number, secret) for number in range(USERS)))
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)
        await store.update_run(run.id, state="finished")

    async def _user(self, number: int, secret: str) -> None:
        """One session after the other, until a second after the decision."""
        until_s, count = float("inf"), number
        while time.monotonic() < until_s and count < MAX_SESSIONS:
            if self.trial.decisions and until_s == float("inf"):
                until_s = time.monotonic() + AFTER_S
            await self._one_session(f"{self.trial.number}-{count}", count, secret)
            count += USERS

    async def _one_session(self, name: str, count: int, secret: str) -> None:
        base = self.gateways[count // USERS % len(self.gateways)]
        other = self.gateways[(count // USERS + 1) % len(self.gateways)]
        headers = {"authorization": f"Bearer {secret}", "x-agl-session": name}
        start = time.time()
        first = await self._said(base, headers)
        if first is None:
            return
        self.trial.starts.append((start, int(first[0])))
        await self._posted(f"{base}/v1/reward", {"score": float(first.endswith("right"))}, headers)
        if count % 4 == 0 and (second := await self._said(other, headers)) is not None:
            self.trial.mixed += second[0] != first[0]

    async def _said(self, base: str, headers: dict[str, str]) -> str | None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Which way?"}]}
        answer = await self._posted(f"{base}/v1/chat/completions", body, headers)
        return None if answer is None else str(answer["choices"][0]["message"]["content"]).strip()

    async def _posted(self, url: str, body: JSON, headers: dict[str, str]) -> Any:
        async with self.session.post(url, json=body, headers=headers) as reply:
            if reply.status == 200:
                return await reply.json()
            self.trial.failed += 1
            print(f"{reply.status}: {(await reply.text())[:300]}", file=sys.stderr)
            return None


async def serve(engine: StaticEngine, stack: AsyncExitStack) -> str:
    """Serve an engine from this process; its URL."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def start_gateways(folder: Path, stack: AsyncExitStack) -> list[str]:
    """A server with its store in SQLite, and one gateway more in front of it; their URLs."""
    urls: list[str] = []
    for store in (f"sqlite:///{folder}/agl.db", ""):
        log = (folder / f"gateway-{len(urls)}.log").open("w")
        stack.callback(log.close)
        port = free_port()
        words = [sys.executable, "-m", "agentlightning", "serve", "--port", str(port), "--store", store or urls[0]]
        process = await asyncio.to_thread(start_process, words, log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        urls.append(f"http://127.0.0.1:{port}")
        await answers(f"{urls[-1]}/healthz", process)
    return urls


def start_process(words: list[str], log: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env={**os.environ, KEY_VARIABLE: KEY}, stdout=log, stderr=log)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns once a server answers."""
    end_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < end_s:
            try:
                async with session.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    sys.exit(f"{url} does not answer")


if __name__ == "__main__":
    main()
