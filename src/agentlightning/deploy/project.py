"""The project to deploy: a run's configuration, the folder that it lies in, and how an image installs its packages.

Driven by `agl deploy`. Reads files and never imports the agent; resolves no packages, knows nothing of images or clusters.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from agentlightning.config.engine import LocalSampler, VllmSampler
from agentlightning.config.external import secret_variables
from agentlightning.config.file import load_config, read_toml
from agentlightning.config.run import Config
from agentlightning.errors import ConfigError

NAMED_FILES: Mapping[str, str] = MappingProxyType(
    {
        "requirements": r"^\s*(-[rce]\b|--(requirement|constraint|editable)\b|\.{0,2}/|file:)|@\s*(file:|\.{0,2}/)",
        "uv.lock": r'source = \{ (editable|directory|virtual|path) = "(?!\.")',  # "." is the project, which is not installed
        "pyproject.toml": r"^dynamic\b[^\]]*dependencies",
    }
)
"""Of each kind of file, lines that name other files of the project."""
UV_VERSION = "0.9.7"
INSTALL = "uv pip install --no-cache --python /opt/venv/bin/python --requirement"
EXPORT = "uv export --frozen --no-dev --no-emit-project --format requirements-txt --output-file /tmp/agent.txt"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The files that name an agent's Python packages, and the commands that install them."""

    files: tuple[str, ...]
    """Copied into the image before the agent's code, so that a change of the code alone installs nothing again; "." if they
    name other files of the project."""
    commands: tuple[str, ...]
    """Shell commands, run in the folder with the files."""
    sentence: str
    """Says where they were found, for the reader of the image's file."""


def find_dependencies(root: Path) -> Dependencies:
    """Finds the packages of a project: of uv.lock, else of requirements*.txt, else of pyproject.toml.

    ConfigError if several requirements files could be meant.
    """
    found = _of_a_file(root)
    file = found.files[-1] if found.files else ""
    lines = next((lines for kind, lines in NAMED_FILES.items() if file.startswith(kind)), None)
    if lines is None or not re.search(lines, (root / file).read_bytes().decode("utf-8", "replace"), re.MULTILINE):
        return found
    sentence = f"{found.sentence} It names files of the project: all of it is copied first."
    return replace(found, files=(".",), sentence=sentence)


def _of_a_file(root: Path) -> Dependencies:
    pyproject = root / "pyproject.toml"
    if (root / "uv.lock").is_file() and pyproject.is_file():
        sentence = "uv.lock: every version and hash is fixed there."
        return Dependencies(("pyproject.toml", "uv.lock"), (EXPORT, f"{INSTALL} /tmp/agent.txt"), sentence)
    names = sorted(path.name for path in root.glob("requirements*.txt"))
    if "requirements.txt" in names:
        names = ["requirements.txt"]
    # Those that say dev, test or docs are for other people.
    names = [name for name in names if not any(word in name for word in ("dev", "test", "doc", "lint"))]
    if len(names) > 1:
        several = ", ".join(names)
        raise ConfigError(f"requirements*.txt: expected one file, or one called requirements.txt, got {several}")
    if names:
        sentence = f"{names[0]}. What it leaves open is resolved when the image is built."
        return Dependencies((names[0],), (f"{INSTALL} {names[0]}",), sentence)
    project = read_toml(pyproject).get("project") if pyproject.is_file() else None
    if isinstance(project, dict) and (project.get("dependencies") or "dependencies" in project.get("dynamic", ())):
        sentence = "[project] of pyproject.toml. It fixes no versions: `uv lock` makes a file that does."
        return Dependencies(("pyproject.toml",), (f"{INSTALL} pyproject.toml",), sentence)
    none = (
        "none: no uv.lock, no requirements*.txt and no [project] with dependencies in pyproject.toml next to the "
        "configuration, so the image has agentlightning alone; list what the agent imports in requirements.txt."
    )
    return Dependencies((), (), none)


SAMPLER_KEY = "SAMPLER_KEY"
"""Variable with the key of the samplers, where the configuration names no other."""
EXTRAS = {"s3": "s3", "abfs": "azure"}
"""Extras of this package by the scheme of a URL that needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A run's configuration and the folder around it, as images hold it."""

    root: Path
    """The build context: the folder of the configuration."""
    config_file: str
    """Path in it, as is every other path here."""
    config: Config
    name: str
    """Id of the run, and what images and charts are called by."""
    agent: str
    """First argument of `agl worker`."""
    rewards: tuple[str, ...]
    """Its --reward, each."""
    dependencies: Dependencies
    node: bool
    """True where the agent is a program of Node with a package-lock.json."""
    model: str | None
    """Folder of the model in the project; None where it comes from a hub."""
    withheld: tuple[str, ...]
    """Files that agents must not see: the configuration, the model and the tasks, held-out ones among them."""
    notes: tuple[str, ...]
    """Sentences for whoever deploys it."""

    @property
    def uses_vllm(self) -> bool:
        """True where vLLM servers sample."""
        return not isinstance(self.config.engine.sampler, LocalSampler)

    @property
    def sampler_key(self) -> str:
        """Variable with the key that samplers ask gateways for."""
        return self.config.engine.key_env or SAMPLER_KEY

    @property
    def external_hosts(self) -> dict[str, list[str]]:
        """Hosts that a variable's value may be sent to, by variable, as `agl serve --external-keys` reads them."""
        found: dict[str, set[str]] = {}
        for external in self.config.external.values():
            if external.key_env is not None:
                parts = urlsplit(external.url)
                plain = parts.scheme == "http" and parts.port is not None
                found.setdefault(external.key_env, set()).add(parts.netloc if plain else str(parts.hostname))
        return {variable: sorted(hosts) for variable, hosts in sorted(found.items())}

    @property
    def trainer_keys(self) -> tuple[str, ...]:
        """Variables of the trainer alone: keys of its trackers, of credit rules, of alerts."""
        others = {self.sampler_key, *self.external_hosts}
        return tuple(sorted(secret_variables(self.config.model_dump()) - others))

    @property
    def trainer_extras(self) -> str:
        """Extras of this package that the trainer needs, as pip reads them."""
        config = self.config
        extras = {"train", "data", *config.trainer.trackers}
        extras |= {"verl"} if config.engine.name == "verl" else set()
        extras |= {"lora"} if config.engine.lora_rank is not None else set()
        scheme = (config.trainer.checkpoint_url or "").partition("://")[0]
        for word in (config.engine.optimizer.type, scheme):
            extras |= {EXTRAS[word]} if word in EXTRAS else set()
        return ",".join(sorted(extras))


def read_project(config_file: Path) -> Project:
    """The project of a configuration. ConfigError where it cannot be deployed as it is."""
    config = load_config(config_file)
    root = config_file.parent.resolve()
    _check(config)
    inside = list(_named_paths(config, root))
    agent = config.agent.run or str(config.agent.command)
    words = shlex.split(agent) if config.agent.run is None else []
    dependencies = find_dependencies(root)
    file = image_path("CONFIG", config_file.name)
    for name in dependencies.files:
        image_path("packages of the agent", name)
    if not config_file.resolve().is_relative_to(root):
        where = f"{config_file} is a link to a file outside of {root}"
        raise ConfigError(f"CONFIG: {where}; expected the file itself there")
    return Project(
        root=root,
        config_file=file,
        config=config,
        name=_run_name(config_file),
        agent=_relative(agent, root),
        rewards=tuple(_relative(spec, root) for spec in config.agent.reward_specs),
        dependencies=dependencies,
        node=bool(words) and words[0] == "node" and (root / "package-lock.json").is_file(),
        model=next((path for setting, path in inside if setting == "model.path"), None),
        withheld=tuple(sorted({file, *(path for _, path in inside if not path.endswith(".py"))})),
        notes=(f"packages of the agent: {dependencies.sentence}", *_notes(config, words)),
    )


def _check(config: Config) -> None:
    """ConfigError where there is nothing to deploy, or a secret in it."""
    if config.agent_model is not None:
        raise ConfigError(
            f"model.path: {config.model.path!r} trains nothing, so there is no trainer to deploy; expected a model"
        )
    if not config.agent.given:
        raise ConfigError("agent: expected run or command; without an agent there are no workers to deploy")
    sampler = config.engine.sampler
    if isinstance(sampler, VllmSampler) and "--api-key" in " ".join(sampler.arguments):
        raise ConfigError(
            "engine.sampler.arguments: --api-key would stand in the files; the key comes by the environment"
        )


def _notes(config: Config, words: list[str]) -> Iterator[str]:
    if config.sandbox.type == "kubernetes":
        yield (
            f"sandbox: workers create Jobs of {config.sandbox.image}; this folder's image is that of the workers. "
            "Their pods keep this namespace's standard (restricted) by sandbox.pod: runAsNonRoot."
        )
    elif config.sandbox.type != "none":
        yield (
            "sandbox: bubblewrap needs user namespaces, which containers are denied by default: the image is the agents' "
            "sandbox, so start it without this table or see docs/security.md."
        )
    elif words and words[0] != "node" and not words[0].startswith("python"):
        yield f"agent.command: install what {words[0]!r} needs in agent.Dockerfile, which has Python alone."
    if (url := config.trainer.checkpoint_url) is not None and not url.startswith("file:"):
        yield f"trainer.checkpoint_url: give the trainer credentials of {url}, by a role or its environment."


def image_path(setting: str, path: Path | str) -> str:
    """Returns a path in the project as Dockerfiles, lists of ignored files and scripts can name it without quotes.

    ConfigError, which names the setting, where it has signs that one of these reads as something else.
    """
    text = Path(path).as_posix()
    if not re.fullmatch(r"[\w.@+][\w.@+/-]*", text):
        raise ConfigError(f"{setting}: expected a path of letters, digits and any of . _ - + @ /, got {text!r:.200}")
    return text


def _run_name(config_file: Path) -> str:
    """A name for a run, its images and its objects in a cluster (RFC 1123): of the folder and the file.

    >>> _run_name(Path("/home/me/Support_Bot/train.toml")), _run_name(Path("/x/bot/big model.toml"))
    ('support-bot', 'bot-big-model')
    """
    words = [config_file.resolve().parent.name, "" if config_file.stem == "train" else config_file.stem]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, words)).lower()).strip("-")
    return name[:40].strip("-") or "agent"


def _named_paths(config: Config, root: Path) -> Iterator[tuple[str, str]]:
    """Yields (setting, path in the project) of what settings name. ConfigError where it lies outside of it."""
    specs = [("agent.run", config.agent.run), ("data.train", config.data.train), ("data.val", config.data.val)]
    specs += [(f"agent.reward.{number}", one.run) for number, one in enumerate(config.agent.reward)]
    specs += [("model.path", config.model.path)]
    specs += [(f"policies.{alias}.model", one.model) for alias, one in config.policies.items()]
    for setting, value in specs:
        path = Path((value or "").partition(".py:")[0] + (".py" if value and ".py:" in value else ""))
        if value is None or not path.is_absolute():
            continue  # a module, or a name of a hub
        if not path.is_relative_to(root):
            raise ConfigError(
                f"{setting}: {path} lies outside of {root}, the folder of the configuration; move it there"
            )
        inside = path.relative_to(root)
        yield (setting, inside.as_posix() if inside.suffix == ".py" else image_path(setting, inside))


def _relative(spec: str, root: Path) -> str:
    """A specification with paths of the project relative to it: images have the project elsewhere."""
    return spec.replace(f"{root}{os.sep}", "")
