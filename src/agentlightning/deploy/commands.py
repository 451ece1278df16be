"""commands: what the containers of a deployment run, as words of our own command line.

One place for every target, so that a container of Compose and a pod of a cluster start alike. Secrets are in none of them:
they come by the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentlightning.config.engine import VllmSampler
from agentlightning.deploy.project import Project

SERVER_PORT, METRICS_PORT, SAMPLER_PORT, VLLM_PORT, CONSOLE_PORT = 8088, 8089, 9000, 8000, 7860
DRAIN_TIMEOUT_S = 60
"""Time for agents to end by themselves when their worker is told to; whoever kills it waits 15 s more."""
KEYS_FILE = "/etc/agl/keys.toml"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names at which the parts of a deployment find each other."""

    server: str
    trainer: str
    vllm: str

    def samplers(self, project: Project) -> list[str]:
        """HOST:PORT of what samples, as the server's list of keys names it."""
        return [f"{self.vllm}:{VLLM_PORT}" if project.uses_vllm else f"{self.trainer}:{SAMPLER_PORT}"]


def server_command() -> list[str]:
    """The gateway; AGL_STORE has the store's URL, AGL_SERVER_KEY the key of /api."""
    ports = ["--port", str(SERVER_PORT), "--metrics-port", str(METRICS_PORT)]
    return ["agl", "serve", "--host", "0.0.0.0", *ports, "--external-keys", KEYS_FILE]


def trainer_command(project: Project, hosts: Hosts) -> list[str]:
    """The trainer with its engine. --run starts the run, and goes on with it when the container is started again."""
    settings = ["agent.workers=0", f"engine.key_env={project.sampler_key}"]
    if project.uses_vllm:
        settings += [f"engine.sampler={_vllm_table(project, hosts)}"]
    else:
        settings += [
            f"engine.listen=0.0.0.0:{SAMPLER_PORT}",
            f'engine.advertise=["http://{hosts.trainer}:{SAMPLER_PORT}"]',
        ]
    words = ["agl", "train", project.config_file, "--run", project.name, "--server", _url(hosts), "--runs", "/runs"]
    return words + [word for setting in settings for word in ("--set", setting)]


def worker_command(project: Project, hosts: Hosts, labels: Mapping[str, str] | None = None) -> list[str]:
    """Agents; AGL_SERVER_KEY has a token for workers of this run."""
    words = ["agl", "worker", project.agent, "--server", _url(hosts), "--run", project.name]
    words += ["--concurrency", str(project.config.agent.concurrency), "--drain-timeout", str(DRAIN_TIMEOUT_S)]
    words += [word for spec in project.rewards for word in ("--reward", spec)]
    asked = {**project.config.agent.labels, **(labels or {})}
    return words + [word for name, value in asked.items() for word in ("--label", f"{name}={value}")]


def console_command(hosts: Hosts) -> list[str]:
    """The web console, which only reads; AGL_SERVER_KEY has a reader's token, which browsers are asked for."""
    return ["agl", "console", "--server", _url(hosts), "--host", "0.0.0.0", "--port", str(CONSOLE_PORT)]


def vllm_arguments(project: Project) -> list[str]:
    """Arguments of a vLLM server that takes new weights from the trainer, as docs/engines.md explains them."""
    sampler = project.config.engine.sampler
    own = sampler.arguments if isinstance(sampler, VllmSampler) else ()
    return [
        *("--model", project.config.model.path if project.model is None else f"/app/{project.model}"),
        *("--host", "0.0.0.0", "--port", str(VLLM_PORT), "--enable-scale-out"),
        *("--logprobs-mode", "processed_logprobs", "--structured-outputs-config", '{"backend": "guidance"}'),
        *("--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"),
        *("--weight-transfer-config", '{"backend": "agentlightning"}', *own),
    ]


def _vllm_table(project: Project, hosts: Hosts) -> str:
    """The whole table [engine.sampler], since servers that run elsewhere have none of the settings of those started here."""
    url = f"http://{hosts.vllm}:{VLLM_PORT}"
    return f'{{type="vllm_server", urls=["{url}"], weights="http://{hosts.trainer}"}}'


def _url(hosts: Hosts) -> str:
    return f"http://{hosts.server}:{SERVER_PORT}"
