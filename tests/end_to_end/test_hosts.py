"""A training run on four hosts: the server, the trainer with its engine, and two workers.

Each has its own network, its own folder and its own shared memory, so that nothing passes between them but by the network.
That brings everything 20 ms late, and drops connections in the middle of anything. Hosts are cut off for a minute each;
the run goes on.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from command_line import Folder, until
from network import Host, Network, missing
from training import Training, build_model

from agentlightning.engines.vllm.servers import VLLM_SIDE
from agentlightning.records import ABANDONED, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient

pytestmark = [pytest.mark.slow, pytest.mark.long]

KEY = {"AGL_SERVER_KEY": "key-of-the-tests"}
SAMPLER_KEY = {"SAMPLER_KEY": "key-of-the-sampler"}
SERVE, SAMPLE, BEHIND = 8088, 9000, 1
"""Ports that others are told; what is behind the bad network has the next one."""
LATENCY_S, LIFE_S = 0.02, 10.0
START_S = 300.0
VLLM = Path(os.environ.get("AGL_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
VLLM_SERVER = (
    *("vllm.entrypoints.openai.api_server", "--model", "model", "--served-model-name", "policy", "--port", str(SAMPLE)),
    *("--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--kv-cache-memory-bytes", str(512 << 20), "--structured-outputs-config", '{"backend": "guidance"}'),
    *("--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"),
    *("--weight-transfer-config", '{"backend": "agentlightning"}', "--api-key", SAMPLER_KEY["SAMPLER_KEY"]),
)
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(VLLM_SIDE),
}
AGENT = """
from openai import AsyncOpenAI

from agentlightning.demo import lookup


async def solve(task, llm):
    # As often as a network asks for that drops connections while a call waits for a host that is cut off.
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client, max_retries=100)
    return await lookup.solve(task, llm, client)
"""


class Hosts(Training):
    """The run, as a test sees it that sees all hosts."""

    def __init__(self, network: Network, folder: Folder, model: Path, *more: str) -> None:
        """more: names of hosts that the model is on, too."""
        paths = {name: folder.path / name for name in ("server", "trainer", "one", "two", *more)}
        for path in paths.values():
            path.mkdir()
        self.hosts = {
            name: network.host(name, path, hidden=[other for other in paths.values() if other != path])
            for name, path in paths.items()
        }
        for name in ("trainer", *more):
            shutil.copytree(model, paths[name] / "model")
        super().__init__(Folder(paths["trainer"]), paths["trainer"] / "model")
        for worker in ("one", "two"):
            (paths[worker] / "agent.py").write_text(AGENT)
        self.store = f"sqlite:///{paths['server']}/agl.db"
        server, trainer = (self.hosts[name].address for name in ("server", "trainer"))
        self._url, self._sampler = f"http://{server}:{SERVE}", f"http://{trainer}:{SAMPLE}"
        samplers = [f"{trainer}:{SAMPLE}", *(f"{self.hosts[name].address}:{SAMPLE}" for name in more)]
        (paths["server"] / "keys.toml").write_text(f"SAMPLER_KEY = {samplers}")
        self._links = []
        for name, port, seed in (("server", SERVE, 1), ("trainer", SAMPLE, 2)):
            behind = server if name == "server" else "127.0.0.1"
            link = [f"{self.hosts[name].address}:{port}", f"{behind}:{port + BEHIND}", "--latency-s", str(LATENCY_S)]
            link += ["--life-s", str(LIFE_S), "--seed", str(seed)]
            self._links.append(self.hosts[name].start("lossy_proxy", *link, PYTHONPATH=str(Path(__file__).parent)))

    async def start_all(self, *engine: str) -> subprocess.Popen[bytes]:
        """Start everything; returns the trainer's process. engine: settings, in place of a sampler of the trainer's."""
        server, trainer = self.hosts["server"], self.hosts["trainer"]
        arguments = ["serve", "--store", "sqlite:///agl.db", "--host", server.address, "--port", str(SERVE + BEHIND)]
        server.start("agentlightning", *arguments, "--external-keys", "keys.toml", **KEY, **SAMPLER_KEY)
        await self._until(self._serves, server)
        async with LightningStoreClient(self._url, KEY["AGL_SERVER_KEY"]) as store:
            token = (await store.create_token("trainer", "trainer", None)).secret
            own = f"engine.listen=127.0.0.1:{SAMPLE + BEHIND}", f'engine.advertise=["{self._sampler}"]'
            settings = ["agent.workers=0", "engine.key_env=SAMPLER_KEY", *(engine or own)]
            arguments = ["train", "run.toml", "--server", self._url]
            arguments += [word for setting in settings for word in ("--set", setting)]
            training = trainer.start("agentlightning", *arguments, AGL_SERVER_KEY=token, **SAMPLER_KEY)
            await self._until(lambda: "waiting for workers" in trainer.log.read_text(), trainer)
            token = (await store.create_token("workers", "worker", self.run_id)).secret
        for name in ("one", "two"):
            words = ["worker", "agent.py:solve", "--server", self._url, "--run", self.run_id, "-n", "8"]
            self.hosts[name].start("agentlightning", *words, AGL_SERVER_KEY=token)
        return training

    @property
    def output(self) -> str:
        return "\n".join(f"--- {name}\n{host.log.read_text()[-2000:]}" for name, host in self.hosts.items())

    def dropped(self) -> Counter[str]:
        """Connections that the bad network dropped, by the host in front of which it is."""
        return Counter(
            {name: len(re.findall(r"(?m)^dropped", host.log.read_text())) for name, host in self.hosts.items()}
        )

    async def cut_off(self, name: str, seconds: float) -> None:
        self.hosts[name].down()
        await asyncio.sleep(seconds)
        self.hosts[name].up()

    async def _check_calls(self, store: LightningStore, rollouts: list[Rollout]) -> None:
        """Every rollout has calls that were answered, each continuing the one before. Beside them are those whose connection
        was dropped for longer than the gateway waits for an agent's retry: nothing is learned from them."""
        calls = await store.calls([rollout.id for rollout in rollouts])
        answered = [call for call in calls if call.finish_reason != ABANDONED]
        assert {call.rollout_id for call in answered} == {rollout.id for rollout in rollouts}
        assert [call.fork_cause for call in answered if call.fork_cause is not None] == []

    async def check_machine(self) -> None:
        for link in self._links:
            link.kill()
        await super().check_machine()

    def _serves(self) -> bool:
        try:
            return httpx.get(f"{self._url}/healthz", trust_env=False, timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    async def _until(self, condition: Callable[[], object], host: Host) -> None:
        try:
            await asyncio.to_thread(until, condition, f"{host.name} is ready", START_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.output}") from late


@pytest.fixture
def hosts(folder: Folder, model: Path) -> Iterator[Hosts]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Network() as network:
        yield Hosts(network, folder, model)


async def test_a_run_on_four_hosts_over_a_bad_network_loses_nothing_where_each_is_cut_off(hosts: Hosts) -> None:
    hosts.hosts["one"].clock_s = 3600.0  # leases follow the store's clock
    training = await hosts.start_all()
    for step, name in enumerate(("server", "trainer", "one"), 1):
        await hosts.after_step(training, step)
        await hosts.cut_off(name, 60.0)
    assert await hosts.ended(training) == 0, hosts.output
    attempts = Counter(attempt.state for attempt in await hosts.check())
    assert set(attempts) <= {"lost", "succeeded"}, "the network is not the agent's failure"
    assert hosts.dropped()["server"] > 0
    assert hosts.dropped()["trainer"] > 0


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM.exists(), reason=f"{VLLM} does not exist: `make test-vllm` installs vLLM there")
async def test_vllm_samples_on_a_host_of_its_own_and_is_waited_for_where_that_is_cut_off(
    folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    model = build_model(tmp_path_factory.mktemp("wide") / "model", "--head-dim", "32")
    with Network() as network:
        hosts = Hosts(network, folder, model, "sampler")
        host, trainer = hosts.hosts["sampler"], hosts.hosts["trainer"]
        url = f"http://{host.address}:{SAMPLE}"
        host.start(*VLLM_SERVER, "--host", host.address, program=str(VLLM), **VLLM_ENVIRONMENT)
        sampler = f'{{type="vllm_server", urls=["{url}"], weights="http://{trainer.address}"}}'
        training = await hosts.start_all(f"engine.sampler={sampler}")
        await hosts.after_step(training, 1)
        await hosts.cut_off("sampler", 60.0)
        assert await hosts.ended(training) == 0, hosts.output
        await hosts.check()
