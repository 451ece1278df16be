"""ScienceWorld: the kind ``scienceworld:TASK,TASK…``, or ``scienceworld:all``: experiments in a simulated house, in text.

Options: simplifications ("easy", or some of its own, joined by commas), max_calls. The splits are ScienceWorld's own:
training and development variations; those of the test set are for a final figure. One JVM plays all episodes of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JJavaError
from scienceworld.constants import BASEPATH, ID2TASK, JAR_PATH

from agentlightning.environments.base import EpisodeResult, Split
from agentlightning.environments.player import Action, Observation, play_episode, text_command
from agentlightning.errors import ConfigError, InfrastructureError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

JAVA_OPTIONS = ("-Xmx2g", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
"""Rooms list their things in the order of a set of identity hashes: constant ones give each task one text."""
Result = TypeVar("Result")
UNKNOWN = "No known action matches that input."


class ScienceWorld:
    """The variations of one or more tasks. The reward is the final score, 1 for a solved task and -1 for a failed one."""

    def __init__(self, tasks: str, *, simplifications: str = "easy", max_calls: int = 50) -> None:
        known = list(ID2TASK.values())
        self._names = known if tasks == "all" else tasks.split(",")
        if unknown := [name for name in self._names if name not in known]:
            raise ConfigError(
                f"env scienceworld: expected 'all' or some of {', '.join(sorted(known))}, got {unknown[0]!r}"
            )
        if shutil.which("java") is None:
            raise ConfigError(
                "env scienceworld: needs Java, which is not here; install it, for example with: "
                "apt-get install default-jre-headless"
            )
        self._simplifications = simplifications
        self._max_calls = max_calls
        self._simulator = _Simulator()

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        rows = [
            {"task": name, "variation": variation}
            for name in self._names
            for variation in self._simulator.variations(name, self._simplifications, split)
        ]
        random.Random(seed).shuffle(rows)
        yield from rows[:limit]

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        game = _Game(self._simulator, task, self._simplifications)
        return await play_episode(game, llm, max_calls=self._max_calls)

    def close(self) -> None:
        self._simulator.close()


class _Simulator:
    """One JVM, started with the first call, and anew after it died. Its worlds share a generator of random numbers that
    loading a world seeds, so calls go one at a time, each with a seed of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gateway: Any = None

    def variations(self, name: str, simplifications: str, split: Split) -> list[int]:
        def find(jvm: Any) -> list[int]:
            world = self._loaded(jvm, name, 0, simplifications)
            return list(world.getVariationsTrain() if split == "train" else world.getVariationsDev())

        return self.call(find)

    def open(self, task: JSON, simplifications: str) -> tuple[Any, str, str]:
        """A world, its task's description and the forms of its commands."""

        def make(jvm: Any) -> tuple[Any, str, str]:
            world = self._loaded(jvm, task["task"], task["variation"], simplifications)
            world.reset()
            return world, str(world.getTaskDescription()), ", ".join(world.getPossibleActions())

        return self.call(make)

    def step(self, world: Any, command: str, seed: int) -> tuple[str, float, bool]:
        """The world's answer to a command, its score from -1 to 1, and whether the task is over."""

        def step(jvm: Any) -> tuple[str, float, bool]:
            getattr(getattr(jvm.scala.util, "Random$"), "MODULE$").setSeed(seed)
            try:
                seen = str(world.step(command))
            except Py4JJavaError:  # a command that its parser breaks on; the JVM goes on
                seen = UNKNOWN
            score = float(world.getScore())
            return seen, score, bool(world.getCompleted()) or score < 0

        return self.call(step, world)

    def call(self, use: Callable[[Any], Result], world: Any = None) -> Result:
        """The result of `use` on the JVM. InfrastructureError where the JVM, or that of `world`, ended or cannot start."""
        with self._lock:
            try:
                if self._gateway is None:
                    self._gateway = _start()
                if world is not None and world._gateway_client is not self._gateway._gateway_client:
                    raise InfrastructureError("env scienceworld: its JVM: ended, and this world with it")
                return use(self._gateway.jvm)
            except (Py4JError, OSError) as cause:
                self._end()
                raise InfrastructureError(f"env scienceworld: its JVM: {type(cause).__name__}: {cause}") from cause

    def close(self) -> None:
        with self._lock:
            self._end()

    def _loaded(self, jvm: Any, name: str, variation: int, simplifications: str) -> Any:
        world = jvm.scienceworld.runtime.pythonapi.PythonInterface()
        known = {"", "easy", *str(world.getPossibleSimplifications()).split(", ")}
        if unknown := [one for one in simplifications.split(",") if one not in known]:
            raise ConfigError(
                f"env scienceworld: simplifications: expected some of {', '.join(sorted(known - {''}))}, got {unknown[0]!r}"
            )
        world.load(name, variation, simplifications, False)
        return world

    def _end(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is None:
            return
        with contextlib.suppress(Py4JError, OSError):
            gateway.shutdown()
        process = gateway.java_process
        process.kill()
        process.wait()
        process.stdin.close()


def _start() -> Any:
    # It ends with its standard input, so with this process, too.
    port, process = launch_gateway(
        classpath=JAR_PATH, die_on_exit=True, cwd=BASEPATH, javaopts=list(JAVA_OPTIONS), return_proc=True
    )
    return JavaGateway(gateway_parameters=GatewayParameters(auto_field=True, port=port), java_process=process)


class _Game:
    """One episode. A reply's last line is the command."""

    tools = ()

    def __init__(self, simulator: _Simulator, task: JSON, simplifications: str) -> None:
        self._simulator = simulator
        self._task = task
        self._simplifications = simplifications
        self._seed = zlib.crc32(f"{task['task']} {task['variation']}".encode())
        self._world: Any = None
        self._score = 0.0
        self._moves = self._unknown = 0
        self.system = ""

    async def start(self) -> Observation:
        self._world, description, commands = await asyncio.to_thread(
            self._simulator.open, self._task, self._simplifications
        )
        self.system = f"{description}\nReply with one command. Commands: {commands}. OBJ is a thing that you see."
        seen, _, _ = await self._step("look around")
        return Observation(text=seen)

    async def act(self, action: Action) -> tuple[Observation, float]:
        command, before = text_command(action), self._score
        seen, reward, over = await self._step(command)
        self._unknown += seen == UNKNOWN
        return Observation(text=seen, over=over), reward - before

    def result(self) -> EpisodeResult:
        metrics = {"unknown_commands": float(self._unknown)}
        return EpisodeResult(reward=self._score, success=self._score >= 1, metrics=metrics)

    async def _step(self, command: str) -> tuple[str, float, bool]:
        self._moves += 1
        seen, self._score, over = await asyncio.to_thread(
            self._simulator.step, self._world, command, self._seed + self._moves
        )
        return seen, self._score, over
