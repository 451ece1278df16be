"""Harbor: the kind ``harbor:FOLDER?agent=NAME``: a folder of tasks, each played by an agent of Harbor in a container.

Options: agent (a name that Harbor knows, or ``file.py:Class``), environment (a type of Harbor's, "docker" by default, or
``file.py:Class``), host (the name under which containers reach the machine of the server), and those of the agent. A trial
without a valid reward is an error, and never a reward of 0.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentlightning.environments.base import EpisodeResult, Split
from agentlightning.errors import ConfigError, InfrastructureError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM
from agentlightning.runtime.code_loader import load_code

HELD_OUT = 5
"""One task of so many is held out."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
AGENT_ENDED = frozenset(
    {
        "AgentTimeoutError",
        "NonZeroAgentExitCodeError",
        "ContextWindowExceededError",
        "ContextLengthExceededError",
        "OutputTokenExceededError",
        "OutputLengthExceededError",
        "AgentSafetyRefusalError",
    }
)
"""Exceptions after which the verifier's reward still counts: the model brought the agent there."""
VERIFIER_FAILED = frozenset(
    {
        "AddTestsDirError",
        "DownloadVerifierDirError",
        "RewardFileEmptyError",
        "RewardFileNotFoundError",
        "VerifierOutputParseError",
        "VerifierTimeoutError",
    }
)


class Harbor:
    """The tasks of a folder: its folders with a task.toml, a fifth of them held out by the hash of their names."""

    def __init__(
        self,
        folder: str,
        *,
        agent: str,
        environment: str = "docker",
        host: str = "host.docker.internal",
        **options: Any,
    ) -> None:
        os.environ |= {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        from harbor.agents.factory import AgentFactory
        from harbor.agents.installed.base import BaseInstalledAgent
        from harbor.models.trial.config import AgentConfig

        self._folder = Path(folder).resolve()
        self._names = sorted(path.parent.name for path in self._folder.glob("*/task.toml"))
        if not self._names:
            raise ConfigError(
                f"env harbor: expected a folder of tasks, each a folder with a task.toml, got {folder!r}; "
                "a published data set becomes one by: harbor download NAME"
            )
        self._agent, self._environment = _importable(agent, "agent"), _importable(environment, "environment")
        self._options = options
        kind = AgentFactory.get_agent_class_from_config(AgentConfig(name=self._agent))
        self.remote_agent = issubclass(kind, BaseInstalledAgent) and ":" not in environment
        self._host = host
        self._provider = {"claude-code": "anthropic", "gemini-cli": "gemini"}.get(agent, "openai")

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        yield from ({"task": name} for name in split_names(self._names, split)[:limit])

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        from harbor.trial.hooks import TrialEvent
        from harbor.trial.trial import Trial

        with tempfile.TemporaryDirectory(prefix="agl-harbor-", ignore_cleanup_errors=True) as folder:
            try:
                trial = await Trial.create(self._trial(task["task"], llm, Path(folder)))
                if self.remote_agent:
                    url = self._url(llm.base_url)
                    trial.add_hook(TrialEvent.AGENT_START, lambda event: reach_gateway(trial.agent_environment, url))
                result = await trial.run()
            except Exception as cause:
                raise InfrastructureError(f"env harbor: {task['task']}: {type(cause).__name__}: {cause}") from cause
        return trial_outcome(result.model_dump(mode="json", include={"verifier_result", "exception_info"}))

    def close(self) -> None:
        """A trial ends its containers itself."""

    def _trial(self, name: str, llm: LLM, folder: Path) -> Any:
        from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig

        openai, anthropic = self._url(llm.base_url), self._url(llm.anthropic_base_url)
        variables = {
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), llm.api_key),
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), openai),
            **dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), anthropic),
        }
        model = f"{self._provider}/{llm.model}"
        agent = AgentConfig(name=self._agent, model_name=model, env=variables, kwargs=self._options)
        if ":" in self._environment:
            place = EnvironmentConfig(import_path=self._environment)
        else:
            place = EnvironmentConfig(type=self._environment, extra_docker_compose=self._overlays(folder))
        return TrialConfig(
            task=TaskConfig(path=self._folder / name), agent=agent, environment=place, trials_dir=folder / "trials"
        )

    def _overlays(self, folder: Path) -> list[Path]:
        """Maps the name to the host, which Docker on Linux does only on request."""
        if self._environment != "docker" or self._host != "host.docker.internal":
            return []
        overlay = folder / "host.yaml"
        overlay.write_text('services:\n  main:\n    extra_hosts: ["host.docker.internal:host-gateway"]\n')
        return [overlay]

    def _url(self, url: str) -> str:
        """The gateway's URL as the agent reaches it."""
        parts = urlsplit(url)
        if not self.remote_agent or parts.hostname not in LOOPBACK:
            return url
        return urlunsplit(parts._replace(netloc=f"{self._host}:{parts.port}" if parts.port else self._host))


def _importable(spec: str, what: str) -> str:
    """Code by its file as Harbor imports it, by its module; names of Harbor's own stay as they are."""
    if ":" not in spec or spec.startswith("acp:"):
        return spec
    loaded = load_code(spec, f"env harbor {what}")
    return f"{loaded.__module__}:{loaded.__qualname__}"


def split_names(names: Sequence[str], split: Split) -> list[str]:
    """Names of one split: a fifth of them is held out, at least one where there are two."""
    drawn = sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))
    held_out = min(max(1, len(drawn) // HELD_OUT), len(drawn) - 1)
    return drawn[:held_out] if split == "val" else drawn[held_out:]


def trial_outcome(result: JSON) -> EpisodeResult:
    """The outcome of a trial's result.json. InfrastructureError and VerifierError where it has no valid reward."""
    failure = result.get("exception_info") or {}
    kind = failure.get("exception_type", "")
    sentence = f"env harbor: {kind}: {failure.get('exception_message', '')}"
    if kind in VERIFIER_FAILED:
        raise VerifierError(sentence)
    if kind and kind not in AGENT_ENDED:
        raise InfrastructureError(sentence)
    rewards = dict((result.get("verifier_result") or {}).get("rewards") or {})
    if not rewards:
        raise VerifierError(f"{sentence}: no reward" if kind else "env harbor: the task has no verifier, so no reward")
    if "reward" not in rewards and len(rewards) > 1:
        raise VerifierError(f"env harbor: expected a reward named 'reward' among {', '.join(sorted(rewards))}")
    reward = float(rewards.pop("reward") if "reward" in rewards else rewards.popitem()[1])
    metrics = {name: float(value) for name, value in rewards.items()}
    return EpisodeResult(reward=reward, success=reward >= 1, metrics={**metrics, "agent_ended": float(bool(kind))})


async def reach_gateway(container: Any, url: str) -> None:
    """InfrastructureError where the agent's container cannot reach the gateway."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connect = shlex.quote(f"</dev/tcp/{parts.hostname}/{port}")
    command = f"if command -v bash >/dev/null; then timeout 10 bash -c {connect}; fi"
    done = await container.exec(command)
    if done.return_code:
        raise InfrastructureError(
            f"the container does not reach the gateway at {parts.hostname}:{port}: let the server listen where containers "
            f"reach it, and name that with host= ({(done.stderr or done.stdout or '').strip()[-200:]})"
        )
